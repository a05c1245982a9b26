"""The split of layers into pipeline stages, and the order of micro-batches in each stage.

A stage first runs as many forward passes as there are stages after it. It then alternates between a forward pass and a
backward pass (1F1B: Narayanan et al. 2021, section 2.2.1). With p stages and k micro-batches, a stage is idle for p - 1
of k + p - 1 passes, as in GPipe (Huang et al. 2019). But stage s stores the activations of at most p - s micro-batches
instead of all k.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dltrain.batch.shares import apportion
from dltrain.models.layers import Layer, layers_of
from dltrain.protocol.errors import MisuseError


@dataclass(frozen=True)
class Cost:
    """The cost of one layer: its operations, its number of trainable parameters, and its output."""

    operations: float
    """Floating-point operations per sample in the forward and backward pass, without element-wise operations.

    Matrix products, convolutions and attention are counted.
    """
    parameters: int
    output: tuple[int, ...]
    """Shape of the layer's output for one sample."""
    dtype: torch.dtype = torch.float32
    """Type of the elements of the layer's output."""


class _ParametersUsed(TorchFunctionMode):
    """Collect the parameters that functions of torch get as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Tensor] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found.update(each for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter))
        return func(*args, **(kwargs or {}))


def costs(model: nn.Module, sample: Tensor) -> list[Cost]:
    """Return the operations, parameters and output shape of each layer, counted without computing (meta device).

    ``sample``: an input with batch size 1. A backward pass has twice the operations of a forward pass: once for the
    gradients of the weights, and once for the gradients of the input. The first layer with parameters does not compute
    the gradients of its input. Raise MisuseError if a layer cannot be a part of a pipeline stage.
    """
    shapes = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
        for each in model.parameters()
    }
    twin = copy.deepcopy(model, shapes).to("meta")  # without a copy of the parameters' values
    x, found = sample.to("meta"), list[Cost]()
    with torch.device("meta"), torch.no_grad():  # the device applies to tensors that forward() creates
        for layer in layers_of(twin):
            x, operations = _counted(layer, x)
            parameters = sum(parameter.numel() for parameter in layer.parameters if parameter.requires_grad)
            passes = 3 if any(cost.parameters for cost in found) else 2
            found.append(Cost(float(passes * operations), parameters, tuple(x.shape[1:]), x.dtype))
    return found


def _counted(layer: Layer, x: Tensor) -> tuple[Tensor, int]:
    """Return (output of ``layer`` for ``x``, operations). Raise MisuseError if it cannot be a part of a stage."""
    what = f"layers: layer {layer.name}"
    used = _ParametersUsed()
    try:
        with FlopCounterMode(display=False) as counter, used:
            out = layer.run(x)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise MisuseError(
            f"{what}: found {type(error).__name__}: {error}; expected a layer that takes the output of the previous "
            f"one, of shape {tuple(x.shape)}, and that needs no values to compute shapes. Check the order of the layers"
        ) from error
    if not isinstance(out, Tensor) or not out.dim() or len(out) != len(x):
        got = f"an output of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise MisuseError(
            f"{what}: found {got} for one sample; expected one tensor whose first dimension is the number of samples, "
            "which the next stage receives. Put layers that exchange several tensors into one module"
        )
    if missing := used.found.difference(layer.parameters):
        sizes = ", ".join(str(tuple(each.shape)) for each in missing)
        raise MisuseError(
            f"{what}: found parameters of shapes {sizes} that the layer uses but does not name; expected all of them. "
            "Add them, or their modules, to the layer's tuple in layers()"
        )
    return out, int(counter.get_total_flops())


def cut(costs: Sequence[Cost], stages: int) -> list[int]:
    """Return the index of each stage's first layer. Stages are contiguous, and each stage has at least one parameter.

    Among all splits, dynamic programming finds one that minimizes the operations of the costliest stage and, among
    these, the parameters of the largest stage. Raise ValueError if there are fewer layers with parameters than stages.
    """
    able = sum(cost.parameters > 0 for cost in costs)
    if able < stages:
        raise ValueError(
            f"model: found {able} layers with parameters; expected at least {stages}, one per pipeline stage"
        )
    n, never = len(costs), (float("inf"), float("inf"))
    # best[e] describes the best split of the layers before e into the stages so far:
    # ((operations of the costliest stage, parameters of the largest stage), indices of the first layer of each stage).
    best: list[tuple[tuple[float, float], list[int]]] = [(never, [])] * (n + 1)
    best[0] = ((0.0, 0.0), [])
    for _ in range(stages):
        after = [(never, list[int]())] * (n + 1)
        for end in range(1, n + 1):
            operations = parameters = 0.0
            for begin in range(end - 1, -1, -1):
                operations += costs[begin].operations
                parameters += costs[begin].parameters
                largest, cuts = best[begin]
                worst = (max(largest[0], operations), max(largest[1], parameters))
                if parameters and worst < after[end][0]:
                    after[end] = (worst, [*cuts, begin])
        best = after
    return best[n][1]


class Turn(NamedTuple):
    """A forward or backward pass of a stage over one micro-batch. ``micro_batch``: its number, from 0."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def turns(stage: int, stages: int, micro_batches: int) -> list[Turn]:
    """Return the passes of ``stage`` in order. Each micro-batch has one forward and one backward pass."""
    ahead = min(micro_batches, stages - 1 - stage)
    found = [Turn("forward", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        found += [Turn("forward", ahead + i), Turn("backward", i)]
    return found + [Turn("backward", i) for i in range(micro_batches - ahead, micro_batches)]


def sizes(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Return the sizes of the micro-batches into which a batch of ``samples`` samples is divided.

    If there are fewer samples than ``micro_batches``, each sample is a micro-batch.
    """
    return apportion(samples, [1] * min(samples, micro_batches))
