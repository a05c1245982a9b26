"""Model parallelism: how a model splits into pipeline stages or tensor-parallel parts, and the pipeline's step time.

Pipeline. One device computes a micro-batch of m samples in t(m). The slowest of p stages does the fraction f of the
arithmetic, so it takes c = f t(m). Sending activations and their gradients (V bytes each per sample, at the largest
boundary) between two stages takes w = 2 (alpha + m V beta), with latency alpha and beta = 1 / bandwidth. Transfers
overlap with computing other micro-batches, except while the pipeline fills and drains. Then, each other stage takes its
own time, together c (1 - f) / f. A step with k micro-batches takes k max(c, w) + c (1 - f) / f + (p - 1) w. With equal
stages, this is k max(c, w) + (p - 1) (c + w) (Huang et al. 2019; Narayanan et al. 2021, section 2.2).

Tensor. Pairs of linear layers do the fraction phi of the arithmetic and have u units. Each of t ranks computes u/t
units, rounded up, and all other layers. A pair all-reduces its output in the forward pass, and the gradient of its
input in the backward pass, unless this input is the data itself (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import Literal

from dlcontract import CollectiveName
from dljob.cluster.catalogue import TermFactors
from dljob.perf.resources import memory
from dljob.perf.resources.memory import COPYING, PREFETCHED_BATCHES, dense_factors, part_nbytes, replicas_nbytes
from dljob.perf.workload.layer import Layer, modules_of
from dljob.perf.workload.linear_pairs import linear_pairs
from dljob.perf.workload.workload import HINTED, REAL_NBYTES, StatedPairs, Workload

HINTED_PAIRS, HINTED_UNITS = 0.5, 8
"""Assumed fraction of a model in pairs of linear layers, and units (attention heads) of a pair, of a model that only
``spec.model.hints`` describe. In the layer tables of BERT and GPT-2, pairs have 0.68 to 1.0 of the operations and of
the parameters, and 12 to 25 heads."""
UNKNOWN_LARGEST = 0.25
"""Assumed part of all bytes in the largest frozen parameter, as in ``zero.UNKNOWN_UNIT``."""
MAX_STAGES = 64
"""Maximum number of pipeline stages that the API accepts."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage. Elements are per sample."""

    parameters: int
    outputs: float
    """Output elements of the stage's layers, as a fraction of those of all layers."""
    input_elements: float
    """Elements that the stage receives from the stage before; 0 for the first stage."""
    largest_elements: float
    """Elements of the largest input or output of a layer."""


@dataclass(frozen=True)
class Stages:
    """A split of a model into pipeline stages."""

    arithmetic: float
    """Fraction of the model's arithmetic that the busiest stage does."""
    stages: tuple[Stage, ...]

    @cached_property
    def parameters(self) -> int:
        """Return the number of parameters in the stage with the most."""
        return max(stage.parameters for stage in self.stages)

    @cached_property
    def boundary_elements(self) -> float:
        """Return the elements per sample that one stage sends to the next, at the largest boundary."""
        return max(stage.input_elements for stage in self.stages)


def _operations(layer: Layer) -> float:
    return layer.forward_FLOPs + layer.backward_FLOPs


def cuts(operations: Sequence[float], able: Sequence[bool], most: int) -> list[list[int]]:
    """Return the best splits into 1, 2, ... stages. A split is a list with the index of each stage's first layer.

    ``operations``: arithmetic operations of each layer. ``able``: True for each layer that can be the only layer of a
    stage. A stage is a contiguous range of layers with at least one such layer. There are at most ``most`` splits. Each
    split minimizes the largest sum of ``operations`` in a stage.
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
                    break  # a stage that begins earlier takes even longer
                worst = max(best[begin][0], total)
                if can and worst < least:
                    least, at = worst, begin
            if at >= 0:
                after[end] = (least, [*best[at][1], at])
        best = after
        found.append(best[-1][1])
    return found


def _stages_of(workload: Workload) -> tuple[Stages, ...]:
    """Return the most balanced splits into 1, 2, ... stages that the trainer supports; at most ``MAX_STAGES`` of them.

    A stage has whole modules, such as residual blocks (``modules_of``).
    """
    blocks = modules_of(workload.layers)
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
        inputs = [0.0, *(part[-1].output_elements for part in parts[:-1])]
        stages = tuple(
            Stage(
                parameters=sum(layer.parameters for layer in part),
                outputs=sum(layer.output_elements for layer in part) / outputs,
                input_elements=received,
                largest_elements=max(received, *(layer.output_elements for layer in part)),
            )
            for part, received in zip(parts, inputs, strict=True)
        )
        found.append(Stages(max(sum(map(_operations, part)) for part in parts) / total, stages))
    return tuple(found)


def pipeline_s(
    slot_s: float, transfer_s: float, stages: int, micro_batches: int, others_s: float | None = None
) -> float:
    """Return the time of a step in the pipeline, in seconds, including the time in which the pipeline fills and drains.

    ``slot_s``: seconds that the slowest stage computes a micro-batch, forward and backward. ``transfer_s``: seconds to
    send a micro-batch's activations and gradients between two stages. ``others_s``: seconds that all other stages
    together compute a micro-batch; None: each takes as long as the slowest.
    """
    filling_s = (stages - 1) * slot_s if others_s is None else others_s
    return micro_batches * max(slot_s, transfer_s) + filling_s + (stages - 1) * transfer_s


@dataclass(frozen=True)
class Pairs:
    """The pairs of linear layers in a model that tensor parallelism splits, with the layers between them.

    ``arithmetic`` is the fraction of the model's operations in all pairs. ``parameters`` is the number of parameters in
    all pairs.
    """

    arithmetic: float
    parameters: int
    outputs: float
    """Output elements of the layers of each pair before its second linear layer, as a fraction of all layers'."""
    summed_elements: tuple[float, ...]
    """Number of elements per sample in each all-reduce over the ranks."""
    units: int
    """Number of units (neurons or attention heads) that can be split in the pair with the fewest units."""


def _pairs_of(workload: Workload) -> Pairs | None:
    """Return the pairs of linear layers that tensor parallelism splits, or None if the model has no pairs.

    The layers of a model that only hints describe are not known: return the stated pairs, or else assumed ones.
    """
    layers = workload.layers
    if workload.name == HINTED:
        return _assumed_pairs(workload) if workload.pairs is None else _stated_pairs(workload, workload.pairs)
    if not (found := list(linear_pairs(layers))):
        return None
    inside = [layer for pair in found for layer in (*pair.split, pair.second)]
    total, outputs = sum(map(_operations, layers)), sum(layer.output_elements for layer in layers)
    sums = [elements for pair in found for elements in (pair.second.output_elements, pair.input_elements)]
    return Pairs(
        arithmetic=sum(map(_operations, inside)) / total,
        parameters=sum(layer.parameters for layer in inside),
        outputs=sum(layer.output_elements for pair in found for layer in pair.split) / outputs,
        summed_elements=tuple(n for n in sums if n),
        units=min(pair.units for pair in found),
    )


def _stated_pairs(workload: Workload, stated: StatedPairs) -> Pairs:
    """Return the pairs of a model of which only figures are known. Ranks sum equally many elements after each pair."""
    sums = 2 * stated.count
    kept = REAL_NBYTES * sum(layer.output_elements for layer in workload.layers)
    return Pairs(
        arithmetic=min(1.0, stated.flops / workload.flops_per_sample),
        parameters=min(stated.parameters, workload.parameters),
        outputs=min(1.0, stated.activation_nbytes / kept) if kept else 0.0,
        summed_elements=(stated.reduced_nbytes / REAL_NBYTES / sums,) * sums,
        units=stated.units,
    )


def _assumed_pairs(workload: Workload) -> Pairs:
    """Return assumed pairs of a model of equal layers. Pairs of adjacent layers have a part of its figures."""
    count = max(1, int(HINTED_PAIRS * len(workload.layers) / 2))
    return Pairs(
        arithmetic=HINTED_PAIRS,
        parameters=int(HINTED_PAIRS * workload.parameters),
        outputs=HINTED_PAIRS / 2,  # the output of the second layer of a pair is whole
        summed_elements=(workload.layers[0].output_elements,) * (2 * count),
        units=HINTED_UNITS,
    )


@dataclass(frozen=True, eq=False)
class Model:
    """A workload, and the ways in which the trainer can split it."""

    workload: Workload
    stages: tuple[Stages, ...]
    """Splits into 1, 2, ... stages, up to the maximum."""
    pairs: Pairs | None
    """None if the model has no pairs of linear layers."""

    def cut_into(self, stages: int) -> Stages:
        """Return the split into ``stages`` pipeline stages. Raise ValueError if so many are not possible."""
        if stages > len(self.stages):
            raise ValueError(
                f"pipeline: found {stages} stages; expected at most {len(self.stages)}, because the model cannot be "
                "split into more stages"
            )
        return self.stages[stages - 1]


@lru_cache(maxsize=64)
def cut_up(workload: Workload) -> Model:
    """Return the workload with the ways to split it. The result is cached, because splitting takes milliseconds."""
    return Model(workload, _stages_of(workload), _pairs_of(workload))


def kept_part(part: float, units: int, ranks: int) -> float:
    """Return the fraction of a model that the rank with the most units holds.

    The fraction ``part`` of the model consists of ``units`` equal units (such as attention heads), which are divided
    among ``ranks`` ranks. Each rank holds the rest of the model completely.
    """
    return 1 - part + part * ceil(units / ranks) / units


@dataclass(frozen=True)
class Held:
    """Bytes of the tensors of a rank with a part of a model."""

    parameters: float
    """Bytes of the trained parameters alone."""
    state: float
    """Parameters, gradients, optimizer state and 16-bit copies."""
    kept: float
    """Samples, and activations that are kept for the backward pass."""
    largest: float
    """The largest activations that exist only briefly."""
    frozen: float = 0.0
    """Parameters that are not trained."""
    loss: float = 0.0
    """Tensors of the loss, of a rank that computes it (``Workload.loss_nbytes``)."""


def stages_held(workload: Workload, stages: Stages, micro_batches: int, batch: int) -> list[Held]:
    """Return the tensors of each pipeline stage.

    A stage keeps the activations of several micro-batches at the same time. Their number is the number of stages from
    this stage to the last stage, but at most ``micro_batches``, the number of micro-batches in a step. Every stage
    loads whole batches of ``batch`` samples.
    """
    samples, found = ceil(batch / micro_batches), list[Held]()
    for i, stage in enumerate(stages.stages):
        received = REAL_NBYTES * stage.input_elements
        each = stage.outputs * workload.activation_nbytes + received
        kept = min(micro_batches, len(stages.stages) - i) * samples * each
        largest = samples * workload.briefly_nbytes(2.0 * REAL_NBYTES * stage.largest_elements)
        loaded = PREFETCHED_BATCHES * batch * workload.sample_nbytes
        loss = samples * workload.loss_nbytes if i == len(stages.stages) - 1 else 0.0
        frozen = stage.parameters / max(1, workload.parameters) * workload.frozen_nbytes
        found.append(_held(workload, stage.parameters, frozen, kept + loaded, largest, loss))
    return found


def tensor_held(workload: Workload, pairs: Pairs, ranks: int, batch: int) -> Held:
    """Return the tensors of the tensor-parallel rank with the most units, of ``ranks`` ranks.

    ``batch``: samples that each of the ranks processes at the same time. All-reduces have a buffer for each size of
    activations.
    """
    share = kept_part(pairs.parameters / workload.parameters, pairs.units, ranks)
    kept = batch * kept_part(pairs.outputs, pairs.units, ranks) * workload.activation_nbytes
    buffers = REAL_NBYTES * batch * sum(set(pairs.summed_elements))
    loaded = PREFETCHED_BATCHES * batch * workload.sample_nbytes
    briefly = batch * workload.briefly_nbytes(), batch * workload.loss_nbytes
    # Ranks divide the pairs' frozen parameters, too. Of pairs that nobody states, it is not known how many are frozen.
    within = workload.pairs.frozen_nbytes if workload.pairs is not None else 0
    frozen = workload.frozen_nbytes - within * (1 - kept_part(1.0, pairs.units, ranks))
    return _held(workload, share * workload.parameters, frozen, kept + buffers + loaded, *briefly)


def _held(workload: Workload, parameters: float, frozen: float, kept: float, largest: float, loss: float) -> Held:
    copies = workload.parameter_copies_nbytes * parameters / max(1, workload.parameters)
    state = (2 + workload.optimizer_slots) * REAL_NBYTES * parameters + copies
    return Held(REAL_NBYTES * parameters, state, kept, largest, frozen, loss)


def gathering_nbytes(workload: Workload, parts: Sequence[Held]) -> list[float]:
    """Return the bytes that each rank needs in addition while rank 0 gathers the state for a checkpoint.

    Each rank serializes the model and then the optimizer state of its part, which takes two copies of the larger one.
    Rank 0 also receives the parts of the others, one after the other, and assembles the whole state.
    """
    slots = workload.optimizer_slots
    messages = [2 * max(part.parameters + part.frozen, slots * part.parameters) for part in parts]
    return [workload.checkpoint_nbytes + max(messages), *messages[1:]]


def filling_nbytes(workload: Workload, part: Held) -> float:
    """Return the memory in bytes that a rank on CPUs needs while it fills its part of a model with frozen parameters.

    The values refer to the weights that the script has loaded, until the whole part has its values. So these are held
    beside the part, and beside the parameter that it gets from rank 0, of at most ``UNKNOWN_LARGEST`` of all bytes.
    """
    whole = workload.loading_nbytes / 2
    held = (1 + UNKNOWN_LARGEST) * whole + part.parameters + part.frozen
    return part_nbytes(0.0, 0.0, 0.0, is_gpu=False) + memory.frozen_nbytes(held, is_gpu=False)


@lru_cache(maxsize=4096)  # the search tries the same splits on each type of device
def rank_nbytes(
    workload: Workload,
    strategy: Literal["Pipeline", "Tensor"],
    ranks: int,
    micro_batches: int,
    replicas: int,
    batch: int,
    is_gpu: bool,
    growth: TermFactors,
    checkpoints: bool,
    collective: CollectiveName,
) -> int:
    """Return the memory in bytes that a rank needs on its device if ``ranks`` ranks split each replica of the model.

    ``batch``: samples per step of one replica. With ``checkpoints``, on CPUs, the result includes what ranks need while
    rank 0 gathers the state of the whole model in main memory (``gathering_nbytes``). All pods have the same size, so
    the rank with the most memory counts. Each rank creates only its part of the model. ``growth``: as for
    ``memory.part_nbytes``. ``collective``: the algorithm that sums the gradients of replicas.
    """
    model = cut_up(workload)
    if strategy == "Pipeline":
        parts = stages_held(workload, model.cut_into(ranks), micro_batches, batch)
    else:
        assert model.pairs is not None, "checked before"
        parts = [tensor_held(workload, model.pairs, ranks, ceil(batch / micro_batches))] * ranks
    factors = dense_factors(workload) or COPYING
    briefly = [each.largest + (each.loss if workload.is_dense and not is_gpu else 0.0) for each in parts]
    needed = [
        part_nbytes(each.state, each.kept, largest, is_gpu, growth, factors)
        for each, largest in zip(parts, briefly, strict=True)
    ]
    if not is_gpu and replicas > 1:
        sums = [replicas_nbytes(each.parameters, replicas, collective, is_dense=workload.is_dense) for each in parts]
        needed = [n + more for n, more in zip(needed, sums, strict=True)]
    copies = 1 + workload.frozen_copies_nbytes / max(1, workload.frozen_nbytes)
    needed = [n + memory.frozen_nbytes(copies * each.frozen, is_gpu) for n, each in zip(needed, parts, strict=True)]
    if not is_gpu and checkpoints:
        needed = [n + more for n, more in zip(needed, gathering_nbytes(workload, parts), strict=True)]
    if not is_gpu and workload.frozen_nbytes:
        needed += [filling_nbytes(workload, each) for each in parts]
    return int(max(needed))
