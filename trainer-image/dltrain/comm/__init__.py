"""Collectives, the operations in which all ranks take part, such as an all-reduce.

Every algorithm has the interface ``core.collective.Collective``. The module ``selection`` chooses an algorithm by its
name.
"""
