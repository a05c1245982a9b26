"""Checkpoints: their content, their interval, and how they are written and read."""
