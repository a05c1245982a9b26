"""Reduction of gradients in the step of an optimizer, for several optimizers and for parameters of several dtypes."""
