"""How a model can be cut: in a row of layers (pipeline stages), or through pairs of linear layers (tensor parallel).

A ``Sequential`` tells by itself; another model has methods ``layers`` and ``pairs``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """One of a row: each takes what the one before returns. ``parameters`` may be another layer's too (tied)."""

    run: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]


@dataclass(frozen=True)
class Pair:
    """Two linear layers between which every *unit* goes its own way: features under an element-wise function, or heads.

    ``first`` makes ``blocks`` values of each unit (3 of a head: query, key and value), ``second`` takes one.
    """

    first: str
    second: str
    """Names of the modules."""
    units: int
    blocks: int = 1


@runtime_checkable
class Layered(Protocol):
    def layers(self) -> list[Layer]: ...


@runtime_checkable
class Paired(Protocol):
    def pairs(self) -> list[Pair]: ...


def layers_of(model: nn.Module) -> list[Layer]:
    """The row of layers that the model is. Raises ValueError when it is none."""
    if isinstance(model, nn.Sequential):
        return [Layer(module, tuple(module.parameters())) for module in model]
    if isinstance(model, Layered):
        return model.layers()
    raise ValueError(f"found a {type(model).__name__}, expected a Sequential, or a model with a method layers()")


def pairs_of(model: nn.Module) -> list[Pair]:
    """Pairs of linear layers, none in two of them; empty where there are none.

    In a ``Sequential``: two linear layers with one activation between them.
    """
    if isinstance(model, Paired):
        return model.pairs()
    found: list[Pair] = []
    row = list(model.named_children()) if isinstance(model, nn.Sequential) else []
    at = 0
    while at + 2 < len(row):
        (name, first), (_, between), (other, second) = row[at : at + 3]
        if isinstance(first, nn.Linear) and isinstance(between, nn.ReLU) and isinstance(second, nn.Linear):
            found.append(Pair(name, other, units=first.out_features))
            at += 2
        at += 1
    return found
