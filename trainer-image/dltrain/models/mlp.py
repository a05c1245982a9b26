"""A multilayer perceptron (inputs-256-128-classes) for any data except tokens."""

from math import prod

from torch import nn


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return three linear layers with ReLU between them; 50,826 parameters on digits."""
    inputs = prod(shape)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
