"""The split of layers into pipeline stages, and the order of micro-batches in each stage.

A stage first runs as many forward passes as there are stages after it. It then alternates between a forward pass and a
backward pass (1F1B: Narayanan et al. 2021, section 2.2.1). With p stages and k micro-batches, a stage is idle for p - 1
of k + p - 1 passes, as in GPipe (Huang et al. 2019). But stage s stores the activations of at most p - s micro-batches
instead of all k.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dltrain.batch.shares import apportion
from dltrain.models.layers import layers_of


@dataclass(frozen=True)
class Cost:
    """The cost of one layer: its operations, its number of parameters, and the shape of its output."""

    operations: float
    """Floating-point operations per sample in the forward and backward pass, without element-wise operations.

    Matrix products, convolutions and attention are counted.
    """
    parameters: int
    output: tuple[int, ...]
    """Shape of the layer's output for one sample."""


def costs(model: nn.Module, sample: Tensor) -> list[Cost]:
    """Return the operations, parameters and output shape of each layer, counted without computing (meta device).

    ``sample``: an input with batch size 1. A backward pass has twice the operations of a forward pass: once for the
    gradients of the weights, and once for the gradients of the input. The first layer with parameters does not compute
    the gradients of its input.
    """
    shapes = {id(each): nn.Parameter(torch.empty_like(each, device="meta")) for each in model.parameters()}
    twin = copy.deepcopy(model, shapes).to("meta")  # without a copy of the parameters' values
    x, found = sample.to("meta"), list[Cost]()
    with torch.device("meta"), torch.no_grad():  # the device applies to tensors that forward() creates
        for layer in layers_of(twin):
            with FlopCounterMode(display=False) as counter:
                x = layer.run(x)
            parameters = sum(parameter.numel() for parameter in layer.parameters)
            passes = 3 if any(cost.parameters for cost in found) else 2
            found.append(Cost(float(passes * counter.get_total_flops()), parameters, tuple(x.shape[1:])))
    return found


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
