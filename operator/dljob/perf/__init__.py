"""The performance model: pure functions that predict time, memory, energy and cost of a step, in SI units.

All predictions follow from explicit formulas, not from a black-box model.
"""
