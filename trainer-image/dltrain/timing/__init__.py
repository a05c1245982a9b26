"""Measurement of the duration of training steps and of their parts."""
