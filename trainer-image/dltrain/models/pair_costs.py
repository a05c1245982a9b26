"""What tensor parallelism splits of a model: its pairs of linear layers, with the layers between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dltrain.models.layers import Pair, pairs_of
from dltrain.models.pass_costs import BATCHES, Input, differentiable, run_pass
from dltrain.protocol.errors import MisuseError


@dataclass(frozen=True)
class PairsProfile:
    """What tensor parallelism splits: pairs of linear layers, with the layers between them.

    ``units``: those of the pair with the fewest. The other figures are those of all pairs together, for a sample.
    """

    count: int
    units: int
    parameters: int
    FLOPs: float
    activation_nbytes: float
    """Saved bytes of which each rank has its part. The input and the output of a pair are whole on each rank."""
    reduced_nbytes: float
    """Bytes that ranks sum: the output of each pair, and the gradient of its input, unless this is the data itself."""
    frozen_nbytes: int = 0
    """Bytes of the pairs' parameters that are not trained. ``parameters`` does not count them."""


class _SummedBytes:
    """The bytes that tensor-parallel ranks sum: the outputs of pairs, and the gradients of their inputs."""

    def __init__(self, model: nn.Module, pairs: Sequence[Pair]) -> None:
        self.nbytes = 0.0
        self._handles = []
        for pair in pairs:
            first, second = model.get_submodule(pair.first), model.get_submodule(pair.second)
            self._handles += [first.register_forward_pre_hook(self._enter), second.register_forward_hook(self._leave)]

    def _enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.nbytes += sum(tensor.nbytes for tensor in differentiable(inputs))

    def _leave(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        self.nbytes += output.nbytes

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def _halved(model: nn.Module, pairs: Sequence[Pair]) -> Iterator[None]:
    """Give the model the linear layers of a rank with half of the units of each pair. Restore them at the end."""
    replaced = list[tuple[nn.Module, str, nn.Parameter]]()

    def cut(name: str, dim: int, pair: Pair) -> None:
        layer = model.get_submodule(name)
        for key, parameter in list(layer.named_parameters(recurse=False)):
            if key == "bias" and dim:
                continue  # added once, after the sum
            shape = list(parameter.shape)
            shape[dim] = shape[dim] // pair.units * (pair.units // 2)
            replaced.append((layer, key, parameter))
            values = torch.empty(shape, dtype=parameter.dtype, device="meta")
            setattr(layer, key, nn.Parameter(values, requires_grad=parameter.requires_grad))

    try:
        for pair in pairs:
            for first in pair.firsts:
                cut(first, 0, pair)
            cut(pair.second, 1, pair)
        yield
    finally:
        for layer, key, parameter in replaced:
            setattr(layer, key, parameter)


def pairs_profile(model: nn.Module, inputs: Sequence[Input], FLOPs: float, saved_nbytes: float) -> PairsProfile | None:
    """Return what tensor parallelism splits of a model, or None if it has no usable pairs.

    A pass with half of the units of each pair shows which operations and saved bytes are split. Pairs are not usable if
    the trainer would refuse them, or if the forward pass fails with a part of them. ``FLOPs``, ``saved_nbytes``: those
    of the whole model for a sample.
    """
    try:
        pairs = pairs_of(model)
    except MisuseError:
        return None
    if not pairs or min(pair.units for pair in pairs) < 2:
        return None
    own = [model.get_submodule(name) for pair in pairs for name in pair.firsts]
    split = [p for layer in own for p in layer.parameters()]
    split += [model.get_submodule(pair.second).get_parameter("weight") for pair in pairs]
    parameters = sum(p.numel() for p in split if p.requires_grad)
    found, summed = list[list[float]](), list[float]()
    with _halved(model, pairs):
        for batch in BATCHES:
            reduced = _SummedBytes(model, pairs)
            try:
                found.append(run_pass(model, inputs, batch, ()))
            except (RuntimeError, TypeError, LookupError, AttributeError, AssertionError, ValueError):
                return None  # The forward pass names the number of heads or features, so that ranks could not run it.
            finally:
                reduced.remove()
            summed.append(reduced.nbytes)
    samples = BATCHES[1] - BATCHES[0]
    _, _, forward, backward, _, saved, *_ = ((b - a) / samples for a, b in zip(*found, strict=True))
    whole = min(pair.units / -(-pair.units // 2) for pair in pairs)  # The other half may have one unit more.
    return PairsProfile(
        len(pairs),
        min(pair.units for pair in pairs),
        parameters,
        whole * (FLOPs - forward - backward),
        whole * (saved_nbytes - saved),
        (summed[1] - summed[0]) / samples,
        sum(p.nbytes for p in split if not p.requires_grad),
    )
