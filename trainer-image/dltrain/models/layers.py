"""Ways to split a model: a sequence of layers (pipeline stages), or pairs of linear layers (tensor parallelism).

For a ``Sequential``, dltrain finds the layers and pairs itself. Other models need the methods ``layers`` and ``pairs``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """One layer of a sequence. Its input is the previous layer's output. Layers may share parameters (tied weights).

    ``run``: the layer's forward pass. ``parameters``: the model's parameters that it uses.
    """

    run: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]


@dataclass(frozen=True)
class Pair:
    """Two linear layers of a model, between which the hidden *units* are independent, so that ranks can split them.

    A unit is a hidden feature of an MLP or an attention head. The layer ``first`` computes ``blocks`` vectors per unit
    (3 for a head: query, key and value), and the layer ``second`` reads one vector per unit.
    """

    first: str
    second: str
    """Names of the two modules in the model."""
    units: int
    blocks: int = 1


@runtime_checkable
class Layered(Protocol):
    def layers(self) -> list[Layer]: ...


@runtime_checkable
class Paired(Protocol):
    def pairs(self) -> list[Pair]: ...


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the model's sequence of layers. Raise ValueError if the model is not a sequence of layers."""
    if isinstance(model, nn.Sequential):
        return [Layer(module, tuple(module.parameters())) for module in model]
    if isinstance(model, Layered):
        return model.layers()
    raise ValueError(f"model: found a {type(model).__name__}; expected a Sequential, or a model with a method layers()")


def pairs_of(model: nn.Module) -> list[Pair]:
    """Return the pairs of linear layers that tensor parallelism splits. No layer is in two pairs.

    In a ``Sequential``, a pair consists of two linear layers with a ReLU between them. Other models return their pairs
    from a method ``pairs``.
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
