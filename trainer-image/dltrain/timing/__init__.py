"""Measured times of a step."""
