"""Decide whether a job needs a plan or a better one, and make it within the limits of its namespace."""
