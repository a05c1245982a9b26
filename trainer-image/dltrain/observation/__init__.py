"""Observe the structure of a training script that nobody described: count its costs in one of its first steps."""
