"""Quotas and limit ranges of a namespace: what the objects of a plan are charged with, and what is left."""
