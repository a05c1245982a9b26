"""The performance model: time, memory, energy and cost of a step. White-box formulas, pure functions, SI units."""
