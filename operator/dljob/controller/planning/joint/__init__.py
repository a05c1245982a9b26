"""Assign devices to all jobs together, and forecast when the waiting ones start."""
