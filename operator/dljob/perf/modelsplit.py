"""A step where ranks hold parts of the model: pipeline stages, or units of the linear layers. Users: ``planner``.

Pipeline. Of p stages the slowest does the part f of a sample's arithmetic. A micro-batch takes it c = f t(m), its
activations and their gradients w = 2 (alpha + m V beta) between two stages, for the largest V. Transfers hide beside
the computing of the micro-batches before and behind, but not while the pipeline fills and drains:
k max(c, w) + (p - 1) (c + w) for k micro-batches (Huang et al. 2019; Narayanan et al. 2021, section 2.2).

Tensor. The part phi of the arithmetic lies in pairs of linear layers, of which a rank does its units, u/t of them
rounded up; all the rest is done by every rank. A pair sums its output over the ranks going forward, and the gradient of
its input going back, unless that is the data itself (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from dljob.perf.layers import Layer
from dljob.perf.workload import REAL_NBYTES, Workload

_BETWEEN = ("activation", "attention")
"""Kinds of layers that treat every unit by itself."""
HEADS = 4
"""Of gpt-mini's attention, the only one that the trainer splits."""


@dataclass(frozen=True)
class Stages:
    """What of a model the busiest and the largest stage hold; parts of 1."""

    arithmetic: float
    parameters: int
    activations: float
    """Kept for the backward pass, of what the whole model keeps for one micro-batch: the most over stages, each with
    as many micro-batches as it has under way."""
    boundary_elements: float
    """Most elements of a sample that go from one stage to the next."""


def _operations(layer: Layer) -> float:
    return layer.forward_FLOPs + layer.backward_FLOPs


def cut(operations: Sequence[float], able: Sequence[bool], stages: int) -> list[int]:
    """The first layer of each stage: contiguous, the largest sum of ``operations`` as small as can be, each with some
    layer that is ``able``. Raises ValueError when there are too few of those.
    """
    if sum(able) < stages:
        raise ValueError(f"found {sum(able)} layers with parameters, expected one for each of {stages} stages")
    best: list[tuple[float, list[int]]] = [(0.0, []), *[(float("inf"), list[int]())] * len(operations)]
    for _ in range(stages):
        after = [(float("inf"), list[int]())] * (len(operations) + 1)
        for end in range(1, len(operations) + 1):
            total, can = 0.0, False
            for begin in range(end - 1, -1, -1):
                total, can = total + operations[begin], can or able[begin]
                worst = max(best[begin][0], total)
                if can and worst < after[end][0]:
                    after[end] = (worst, [*best[begin][1], begin])
        best = after
    return best[-1][1]


def stages_of(workload: Workload, stages: int, micro_batches: int) -> Stages:
    """Raises ValueError when there are more stages than layers with parameters."""
    layers = workload.layers
    begins = cut([_operations(layer) for layer in layers], [layer.parameters > 0 for layer in layers], stages)
    parts = [layers[a:b] for a, b in zip(begins, [*begins[1:], len(layers)], strict=True)]
    total = sum(map(_operations, layers)) or 1.0
    outputs = sum(layer.output_elements for layer in layers) or 1.0
    return Stages(
        arithmetic=max(sum(map(_operations, part)) for part in parts) / total,
        parameters=max(sum(layer.parameters for layer in part) for part in parts),
        activations=max(
            min(micro_batches, stages - i) * sum(layer.output_elements for layer in part) / outputs
            for i, part in enumerate(parts)
        ),
        boundary_elements=max((layers[begin - 1].output_elements for begin in begins[1:]), default=0.0),
    )


def pipeline_s(slot_s: float, transfer_s: float, stages: int, micro_batches: int) -> float:
    """A step's time in the pipeline: ``slot_s`` of the slowest stage, ``transfer_s`` of a micro-batch to and fro."""
    return micro_batches * max(slot_s, transfer_s) + (stages - 1) * (slot_s + transfer_s)


@dataclass(frozen=True)
class Pairs:
    """What of a model lies in pairs of linear layers; parts of 1."""

    arithmetic: float
    parameters: int
    outputs: float
    """Of all elements that layers return, those of a pair's first layer and of what is between the two."""
    summed_elements: tuple[float, ...]
    """Elements of a sample of each sum over the ranks."""
    units: int
    """Of the pair with fewest."""


def pairs_of(workload: Workload) -> Pairs | None:
    """The pairs as the trainer finds them, none in two; None where there are none."""
    layers = workload.layers
    inside: list[Layer] = []
    between: list[Layer] = []
    sums: list[float] = []
    units: list[int] = []
    at = 0
    while at + 2 < len(layers):
        first, middle, second = layers[at : at + 3]
        if first.kind == second.kind == "linear" and middle.kind in _BETWEEN:
            inside += [first, middle, second]
            between += [first, middle]
            sums += [second.output_elements, layers[at - 1].output_elements if at else 0.0]
            # Its inputs' number is not kept; operations are 2 x inputs x outputs, at every position.
            inputs = round(second.forward_FLOPs / 2 / second.output_elements)
            units.append(HEADS if middle.kind == "attention" else inputs)
            at += 2
        at += 1
    if not inside:
        return None
    total, outputs = sum(map(_operations, layers)), sum(layer.output_elements for layer in layers)
    return Pairs(
        arithmetic=sum(map(_operations, inside)) / total,
        parameters=sum(layer.parameters for layer in inside),
        outputs=sum(layer.output_elements for layer in between) / outputs,
        summed_elements=tuple(n for n in sums if n),
        units=min(units),
    )


def kept_part(part: float, units: int, ranks: int) -> float:
    """Of a whole, what a rank does when ``part`` of it is shared out in ``units``."""
    return 1 - part + part * ceil(units / ranks) / units


def state_nbytes(workload: Workload) -> float:
    """Parameters and optimizer state of the whole model: what is put together for a checkpoint."""
    return (1 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters


def held_nbytes(workload: Workload, parameters: float) -> float:
    """Parameters, gradients and optimizer state of the part that a rank holds."""
    return (2 + workload.optimizer_slots) * REAL_NBYTES * parameters
