"""Checkpoints: what they hold, when they are written, and where they are found again."""
