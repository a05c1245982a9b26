"""A step where ranks hold parts of the model: pipeline stages, or units of the linear layers.

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
from functools import lru_cache
from math import ceil

from dljob.perf.workload.layers import Layer
from dljob.perf.workload.workload import REAL_NBYTES, Workload

_BETWEEN = ("activation", "attention")
"""Kinds of layers that treat every unit by itself."""
HEADS = 4
"""Of gpt-mini's attention, the only one that the trainer splits."""


MAX_STAGES = 64
"""Of a pipeline, by the API."""


@dataclass(frozen=True)
class Stages:
    """What of a model the stages of a pipeline hold; parts of 1."""

    arithmetic: float
    """Of the busiest stage."""
    parameters: int
    """Of the largest one."""
    outputs: tuple[float, ...]
    """By stage: of all elements that layers return for a sample."""
    boundary_elements: float
    """Most elements of a sample that go from one stage to the next."""

    def activations(self, micro_batches: int) -> float:
        """Kept for the backward pass, of what the whole model keeps for one micro-batch: the most over stages, each
        with as many micro-batches as it has under way.
        """
        stages = len(self.outputs)
        return max(min(micro_batches, stages - i) * part for i, part in enumerate(self.outputs))


def _operations(layer: Layer) -> float:
    return layer.forward_FLOPs + layer.backward_FLOPs


def cuts(operations: Sequence[float], able: Sequence[bool], most: int) -> list[list[int]]:
    """For 1, 2, ... ``most`` stages (or as many as there can be) the first layer of each: contiguous, the largest sum
    of ``operations`` as small as can be, each with some layer that is ``able``.
    """
    best: list[tuple[float, list[int]]] = [(0.0, []), *[(float("inf"), list[int]())] * len(operations)]
    found = []
    for _ in range(min(most, sum(able))):
        after = [(float("inf"), list[int]())] * (len(operations) + 1)
        for end in range(1, len(operations) + 1):
            total, can, least, at = 0.0, False, float("inf"), -1
            for begin in range(end - 1, -1, -1):
                total, can = total + operations[begin], can or able[begin]
                if total >= least:
                    break  # what begins earlier does still more
                worst = max(best[begin][0], total)
                if can and worst < least:
                    least, at = worst, begin
            if at >= 0:
                after[end] = (least, [*best[at][1], at])
        best = after
        found.append(best[-1][1])
    return found


def _stages_of(workload: Workload) -> tuple[Stages, ...]:
    """For 1, 2, ... stages, as many as the trainer can cut the model into: it runs some layers as one (``follows``)."""
    blocks: list[list[Layer]] = []
    for layer in workload.layers:
        if layer.follows:
            blocks[-1].append(layer)
        else:
            blocks.append([layer])
    operations = [sum(map(_operations, block)) for block in blocks]
    able = [any(layer.parameters for layer in block) for block in blocks]
    total = sum(operations) or 1.0
    outputs = sum(layer.output_elements for layer in workload.layers) or 1.0
    found = []
    for begins in cuts(operations, able, MAX_STAGES):
        parts = [
            [layer for block in blocks[a:b] for layer in block]
            for a, b in zip(begins, [*begins[1:], len(blocks)], strict=True)
        ]
        found.append(
            Stages(
                arithmetic=max(sum(map(_operations, part)) for part in parts) / total,
                parameters=max(sum(layer.parameters for layer in part) for part in parts),
                outputs=tuple(sum(layer.output_elements for layer in part) / outputs for part in parts),
                boundary_elements=max((part[-1].output_elements for part in parts[:-1]), default=0.0),
            )
        )
    return tuple(found)


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


def _pairs_of(workload: Workload) -> Pairs | None:
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


@dataclass(frozen=True, eq=False)
class Model:
    """A workload, and the parts that the trainer can cut it into."""

    workload: Workload
    stages: tuple[Stages, ...]
    """For 1, 2, ... stages, as many as there can be."""
    pairs: Pairs | None
    """None: no linear layers in pairs."""

    def cut_into(self, stages: int) -> Stages:
        """Raises ValueError when the trainer cannot cut the model into so many."""
        if stages > len(self.stages):
            raise ValueError(
                f"found {len(self.stages)} layers with parameters, expected one for each of {stages} stages"
            )
        return self.stages[stages - 1]


@lru_cache(maxsize=64)
def cut_up(workload: Workload) -> Model:
    """Its parts; cutting takes milliseconds, so it is done once for each model."""
    return Model(workload, _stages_of(workload), _pairs_of(workload))


def kept_part(part: float, units: int, ranks: int) -> float:
    """Of a whole, what a rank does when ``part`` of it is shared out in ``units``."""
    return 1 - part + part * ceil(units / ranks) / units


def state_nbytes(workload: Workload) -> float:
    """Parameters and optimizer state of the whole model: what is put together for a checkpoint."""
    return (1 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters


def held_nbytes(workload: Workload, parameters: float) -> float:
    """Parameters, gradients and optimizer state of the part that a rank holds."""
    return (2 + workload.optimizer_slots) * REAL_NBYTES * parameters
