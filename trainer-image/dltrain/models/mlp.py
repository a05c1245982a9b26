"""A multilayer perceptron with hidden layers of 256 and 128 features, for any data except tokens."""

from math import prod

from torch import nn


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return three linear layers with ReLU between them. For the dataset digits, they have 50,826 parameters."""
    inputs = prod(shape)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
