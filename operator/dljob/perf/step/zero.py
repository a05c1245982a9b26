"""Sharded training state (ZeRO): memory of a rank, and exposed communication of a step, for each stage.

n ranks hold P parameters in units, which are gathered and reduced as a whole (such as transformer layers). Stage 1
shards the optimizer state, stage 2 also the gradients, and stage 3 (FSDP) also the parameters (Rajbhandari et al. 2020,
arXiv 1910.02054, sections 5 and 7). A rank sends, in messages of P (n - 1)/n elements in total each:

    stages 0, 1   per step: a reduce-scatter of gradients, and an all-gather (of gradients or new parameters)
    stage 2       per micro-batch: a reduce-scatter; per step: an all-gather of the new parameters
    stage 3       per micro-batch: an all-gather for the forward pass, one for the backward pass, a reduce-scatter

So with one micro-batch, stage 3 sends 1.5 times the bytes of data parallelism. With gradient accumulation, stages 2 and
3 repeat it for each micro-batch, because no rank has room for all gradients.
"""

from math import ceil
from typing import Literal

from dljob.perf.step.communication import Link, scatter_gather_s
from dljob.perf.step.step import BUCKET_NBYTES, buckets, exposed_s
from dljob.perf.workload.layer import largest_unit
from dljob.perf.workload.workload import HALF_NBYTES, HINTED, REAL_NBYTES, Workload

Stage = Literal[0, 1, 2, 3]
"""Stage of ZeRO, from 1 to 3; 0: plain data parallelism, in which each rank holds all state."""
UNKNOWN_UNIT = 0.25
"""Assumed part of all parameters in a unit of a model without known layers. In the smallest GPT-2, the embeddings have
0.31, and a layer 0.06."""
GATHERED_UNITS = 2
"""Units whose parameters a rank of stage 3 holds as a whole: the one that it computes, and the next one."""


def unit_parameters(workload: Workload) -> int:
    """Return the number of parameters of a unit, which is gathered and reduced as a whole.

    A unit is a block, such as a transformer layer. All layers outside of blocks, such as embedding and output layer,
    are one unit as well. Without blocks, each layer is a unit. The result is that of the largest unit, or of a bucket
    if that is larger. If the layers are not known, the fraction of all parameters is the user's, or ``UNKNOWN_UNIT``.
    """
    hinted = workload.name == HINTED
    largest = ceil(_unit_part(workload) * workload.parameters) if hinted else largest_unit(workload.layers)
    return min(workload.parameters, max(largest, BUCKET_NBYTES // REAL_NBYTES))


def knows_units(workload: Workload) -> bool:
    """Return False if the size of a unit is assumed, because neither the layers nor the user say it."""
    return workload.name != HINTED or workload.stated_unit is not None


def _unit_part(workload: Workload) -> float:
    return UNKNOWN_UNIT if workload.stated_unit is None else min(1.0, workload.stated_unit)


def unit_nbytes(workload: Workload) -> float:
    """Return the bytes of the largest unit in float32, with its frozen parameters."""
    return REAL_NBYTES * unit_parameters(workload) + _unit_part(workload) * workload.frozen_nbytes


def units(workload: Workload) -> int:
    """Return the number of units of the model; at least 1."""
    return max(1, ceil(workload.parameters / max(1, unit_parameters(workload))))


def element_nbytes(workload: Workload) -> int:
    """Return the bytes per parameter in the gathers of stage 3: 4 if forward and backward pass use float32, else 2.

    Units with batch norm, of which convolutional networks consist, are gathered in float32 in any precision.
    """
    return REAL_NBYTES if workload.precision == "FP32" or workload.is_convolutional else HALF_NBYTES


def state_nbytes(workload: Workload, stage: Stage, ranks: int) -> float:
    """Return the bytes of parameters, gradients, optimizer state and 16-bit copies that one of ``ranks`` ranks holds.

    With P parameters in float32 and s slots of optimizer state, stage 0 needs (4 + 4 + 4 s) P bytes. Each stage divides
    one more of the three terms by the number of ranks. With stages 2 and 3, the gradient of one unit exists as a whole
    while it is computed. With stage 3, so do the parameters of ``GATHERED_UNITS`` units. If they are gathered in 16
    bits, there are no other 16-bit copies. No stage needs more than the one before.
    """
    whole = float(REAL_NBYTES * workload.parameters)
    unit = unit_parameters(workload)
    optimizer = workload.optimizer_slots * whole / (ranks if stage >= 1 else 1)
    gradients = min(whole, whole / ranks + REAL_NBYTES * unit) if stage >= 2 else whole
    copies = float(workload.parameter_copies_nbytes)
    parameters = whole + copies
    if stage == 3:
        gathered = GATHERED_UNITS * element_nbytes(workload) * unit
        kept = copies if element_nbytes(workload) == REAL_NBYTES else 0.0
        parameters = min(parameters, whole / ranks + gathered + kept)
    return parameters + gradients + optimizer


def frozen_nbytes(workload: Workload, stage: Stage, ranks: int) -> float:
    """Return the bytes of frozen parameters, with their 16-bit copies, that one of ``ranks`` ranks holds.

    Stage 3 shards frozen parameters, too, and gathers them as it does others. A unit has the same part of them as of
    all parameters, or ``UNKNOWN_UNIT``.
    """
    frozen, gathers_half = float(workload.frozen_nbytes), element_nbytes(workload) < REAL_NBYTES
    whole = frozen + workload.frozen_copies_nbytes
    if stage < 3:
        return whole
    gathered = GATHERED_UNITS * _unit_part(workload) * frozen * element_nbytes(workload) / REAL_NBYTES
    return min(whole, frozen / ranks + gathered + (0.0 if gathers_half else workload.frozen_copies_nbytes))


def exposed_communication_s(
    workload: Workload,
    stage: Literal[2, 3],
    ranks: int,
    link: Link,
    nodes: int,
    micro_batch_s: float,
    micro_batches: int,
    overlap: float,
) -> float:
    """Return the seconds of a step's communication that computing does not hide, for stage 2 or 3.

    ``nodes``: number of nodes that hold the ranks. ``micro_batch_s``: computing seconds of one of ``micro_batches``
    micro-batches. ``overlap``: maximum fraction of the passes that can hide communication. Collectives are rings, as
    NCCL's reduce-scatter and all-gather are. In stage 3, the communication of one unit is never hidden.
    """
    if ranks == 1:
        return 0.0
    n, k = float(ranks), micro_batches
    gradient = float(workload.gradient_nbytes)
    if stage == 2:
        parts = buckets(workload.gradient_nbytes)
        scatter_s, gather_s = scatter_gather_s(gradient, n, link, parts, nodes)
        return float(k * exposed_s(scatter_s, micro_batch_s, parts, overlap) + gather_s)
    parts = units(workload)
    scatter_s, _ = scatter_gather_s(gradient, n, link, parts, nodes)
    gathered = workload.parameters + workload.frozen_nbytes / REAL_NBYTES  # frozen parameters are gathered, too
    _, gather_s = scatter_gather_s(element_nbytes(workload) * gathered, n, link, parts, nodes)
    whole_s = float(2 * gather_s + scatter_s)
    hidden_s = overlap * micro_batch_s * (parts - 1) / parts
    return k * max(whole_s - hidden_s, whole_s / parts)
