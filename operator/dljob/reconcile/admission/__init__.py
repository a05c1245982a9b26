"""Decide when a job may hold devices: for all its pods or none, and in a queue of Kueue only after the admission."""
