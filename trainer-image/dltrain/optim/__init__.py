"""Optimizers, learning rates, gradient scaler, gradient noise scale."""
