"""Model parallelism: how a model splits into pipeline stages or tensor-parallel parts, and the pipeline's step time.

Pipeline. The slowest of p stages does the fraction f of a sample's arithmetic. It computes a micro-batch of m samples
in c = f t(m). Sending its activations and their gradients between two stages takes w = 2 (alpha + m V beta), for the
largest V. Transfers overlap with computing other micro-batches, except while the pipeline fills and drains:
k max(c, w) + (p - 1) (c + w) for k micro-batches (Huang et al. 2019; Narayanan et al. 2021, section 2.2).

Tensor. The fraction phi of the arithmetic is in pairs of linear layers. Each of t ranks computes u/t of their u units,
rounded up, and all of the rest. A pair all-reduces its output in the forward pass, and the gradient of its input in the
backward pass unless that input is the data itself (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from dljob.perf.workload.layers import Layer
from dljob.perf.workload.workload import REAL_NBYTES, Workload

_BETWEEN = ("activation", "attention")
"""Kinds of layers that compute every unit independently."""
HEADS = 4
"""Attention heads of gpt-mini, the only model whose attention the trainer splits."""


MAX_STAGES = 64
"""The API's maximum number of pipeline stages."""


@dataclass(frozen=True)
class Stages:
    """A split of a model into pipeline stages; fractions are of the whole model."""

    arithmetic: float
    """Fraction of the arithmetic in the busiest stage."""
    parameters: int
    """Parameters of the largest stage."""
    outputs: tuple[float, ...]
    """Fraction of all layer outputs, by stage."""
    boundary_elements: float
    """Maximum number of elements per sample sent from one stage to the next."""

    def activations(self, micro_batches: int) -> float:
        """Return the largest activation memory of a stage, relative to the whole model's for one micro-batch.

        Each stage keeps the activations of its micro-batches in flight.
        """
        stages = len(self.outputs)
        return max(min(micro_batches, stages - i) * part for i, part in enumerate(self.outputs))


def _operations(layer: Layer) -> float:
    return layer.forward_FLOPs + layer.backward_FLOPs


def cuts(operations: Sequence[float], able: Sequence[bool], most: int) -> list[list[int]]:
    """Return the first layer of each stage, for 1, 2, ... up to ``most`` stages, or as many as possible.

    Stages are contiguous, contain a layer that is ``able``, and minimize the largest sum of ``operations``.
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
                    break  # a stage that begins earlier is longer still
                worst = max(best[begin][0], total)
                if can and worst < least:
                    least, at = worst, begin
            if at >= 0:
                after[end] = (least, [*best[at][1], at])
        best = after
        found.append(best[-1][1])
    return found


def _stages_of(workload: Workload) -> tuple[Stages, ...]:
    """Return the splits into 1, 2, ... stages that the trainer supports; it runs some layers as one (``follows``)."""
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
    """Return a step's time in the pipeline.

    ``slot_s``: time of a micro-batch in the slowest stage. ``transfer_s``: its transfer time in both directions.
    """
    return micro_batches * max(slot_s, transfer_s) + (stages - 1) * (slot_s + transfer_s)


@dataclass(frozen=True)
class Pairs:
    """The part of a model in pairs of linear layers; fractions are of the whole model."""

    arithmetic: float
    parameters: int
    outputs: float
    """Fraction of all layer outputs that a pair's first layer and the layer between the two return."""
    summed_elements: tuple[float, ...]
    """Elements per sample of each all-reduce over the ranks."""
    units: int
    """Units of the pair with the fewest."""


def _pairs_of(workload: Workload) -> Pairs | None:
    """Return the disjoint pairs that the trainer finds, or None if there are none."""
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
            # A layer does not store its number of inputs. Its operations are 2 x inputs x outputs at every position.
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
    """A workload, and the parts into which the trainer can split it."""

    workload: Workload
    stages: tuple[Stages, ...]
    """Splits into 1, 2, ... stages, up to the maximum."""
    pairs: Pairs | None
    """None if there are no pairs of linear layers."""

    def cut_into(self, stages: int) -> Stages:
        """Return the split into ``stages`` stages. Raise ValueError if the model has too few layers for them."""
        if stages > len(self.stages):
            raise ValueError(
                f"found {len(self.stages)} layers with parameters; expected one for each of {stages} stages"
            )
        return self.stages[stages - 1]


@lru_cache(maxsize=64)
def cut_up(workload: Workload) -> Model:
    """Return the workload's parts, cached because splitting takes milliseconds."""
    return Model(workload, _stages_of(workload), _pairs_of(workload))


def kept_part(part: float, units: int, ranks: int) -> float:
    """Return the fraction of a whole that each rank has if ``part`` of it is divided among ``ranks`` in ``units``."""
    return 1 - part + part * ceil(units / ranks) / units


def state_nbytes(workload: Workload) -> float:
    """Return the bytes of the whole model's parameters and optimizer state, which a checkpoint contains."""
    return (1 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters


def held_nbytes(workload: Workload, parameters: float) -> float:
    """Return the bytes of parameters, gradients and optimizer state of the part that a rank holds."""
    return (2 + workload.optimizer_slots) * REAL_NBYTES * parameters
