"""Collectives that are not in ``schedules``, such as MPI's and torch's own, and the two halves of an all-reduce."""
