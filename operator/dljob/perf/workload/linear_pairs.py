"""The pairs of linear layers in a layer table, which tensor parallelism splits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dljob.perf.workload.layer import Layer

_BETWEEN = ("activation", "attention")
"""Kinds of layers that may stand between the two linear layers of a pair.

Tensor parallelism can split these layers, because they compute every unit independently."""
_PATTERNS = (
    ("linear", "activation", "linear", "multiply", "linear"),  # a gated linear unit
    ("linear", "linear", "linear", "rotary", "attention", "linear"),
    ("linear", "linear", "linear", "attention", "linear"),
    *(("linear", kind, "linear") for kind in _BETWEEN),
)
"""Kinds of the layers of a pair. Each pattern comes before the shorter ones that it contains."""


@dataclass(frozen=True)
class LinearPair:
    """A pair of linear layers. Instead of the first one, there may be several that all feed the second one."""

    split: tuple[Layer, ...]
    """The layers before the second linear layer. A rank has a part of the outputs of each."""
    second: Layer
    input_elements: float
    """Elements per sample of the input; 0 if the input is the data."""

    @property
    def units(self) -> int:
        """Return the number of units that ranks divide: attention heads, or features between the linear layers."""
        # A layer does not store its number of inputs. Its operations are 2 x inputs x outputs at every position.
        inputs = round(self.second.forward_FLOPs / 2 / self.second.output_elements)
        return self.split[-1].heads or inputs


def linear_pairs(layers: Sequence[Layer]) -> Iterator[LinearPair]:
    """Yield the pairs, which are disjoint. The trainer splits the same ones.

    It splits linear layers that feed the same one only if they have equally many outputs. So it splits no attention in
    which several heads of queries share a head of keys and values.
    """
    kinds, at = [layer.kind for layer in layers], 0
    while at < len(layers):
        found = next((p for p in _PATTERNS if tuple(kinds[at : at + len(p)]) == p), ())
        *split, second = layers[at : at + len(found)] or [layers[at]]
        if len({layer.output_elements for layer in split if layer.kind == "linear"}) == 1:
            yield LinearPair(tuple(split), second, layers[at - 1].output_elements if at else 0.0)
            at += len(found)
        else:
            at += 1
