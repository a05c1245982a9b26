"""Optimizers, learning rates, loss scaling for float16, and measurement of the gradient noise scale."""
