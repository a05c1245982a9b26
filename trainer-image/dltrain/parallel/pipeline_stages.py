"""Pipeline stages: where a row of layers is cut, and in which order one does its micro-batches.

Forward passes run ahead by as many micro-batches as there are stages behind; then each is followed by a backward pass
(1F1B: Narayanan et al. 2021, section 2.2.1). The bubble is GPipe's (Huang et al. 2019), p - 1 of k + p - 1 slots for p
stages and k micro-batches, while a stage s holds the activations of p - s micro-batches at most, not of all k.
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
    """Of one layer."""

    operations: float
    """Of one sample forward and backward: matrix products, convolutions and attention."""
    parameters: int
    output: tuple[int, ...]
    """Shape of what it returns for one sample."""


def costs(model: nn.Module, sample: Tensor) -> list[Cost]:
    """Of each layer, counted on PyTorch's meta device: nothing is computed. ``sample``: a batch of one.

    Backward does twice what forward does, for the weights and for the input; the first layer needs no gradient of the
    data.
    """
    twin = copy.deepcopy(model).to("meta")
    x, found = sample.to("meta"), list[Cost]()
    with torch.device("meta"), torch.no_grad():  # the device: for what forward() makes
        for layer in layers_of(twin):
            with FlopCounterMode(display=False) as counter:
                x = layer.run(x)
            parameters = sum(parameter.numel() for parameter in layer.parameters)
            passes = 3 if any(cost.parameters for cost in found) else 2
            found.append(Cost(float(passes * counter.get_total_flops()), parameters, tuple(x.shape[1:])))
    return found


def cut(costs: Sequence[Cost], stages: int) -> list[int]:
    """The first layer of each stage: contiguous stages, the costliest as cheap as can be, each with a parameter.

    Cost is operations; of cuts that cost the same, the one whose largest stage has fewest parameters (exact, by dynamic
    programming over the cuts). Raises ValueError when there are fewer layers with parameters than stages.
    """
    able = sum(cost.parameters > 0 for cost in costs)
    if able < stages:
        raise ValueError(f"found {able} layers with parameters, expected one for each of {stages} stages")
    n, never = len(costs), (float("inf"), float("inf"))
    # best[e]: of the layers before e in the stages so far, the largest operations and parameters; and where each begins
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
    """A stage's pass over one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def turns(stage: int, stages: int, micro_batches: int) -> list[Turn]:
    """What ``stage`` does, in order: every micro-batch forward and backward once, each in rising order."""
    ahead = min(micro_batches, stages - 1 - stage)
    found = [Turn("forward", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        found += [Turn("forward", ahead + i), Turn("backward", i)]
    return found + [Turn("backward", i) for i in range(micro_batches - ahead, micro_batches)]


def sizes(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Samples of each micro-batch, all with at least one: fewer of them for a short batch."""
    return apportion(samples, [1] * min(samples, micro_batches))
