"""Predicted step time and memory of plans with sharded gradients (ZeRO-2) or parameters (ZeRO-3), on equal ranks.

The trainer runs training scripts with ZeRO-3 (strategy Sharded), and no others yet. The plans have
the same number of samples on each rank, and as few micro-batches as the memory allows, because each micro-batch
repeats the communication.

With stage 3, each rank writes its part of a checkpoint, to a volume that all ranks see or to an object store. When
ranks resume, each one reads only its part, so that they then need less memory than for the next checkpoint.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil
from typing import Literal

from dljob.calibrate.learned import Place, SplitPoint
from dljob.cluster.catalogue import Device
from dljob.perf.resources import memory
from dljob.perf.step import zero
from dljob.perf.step.compute import active_part
from dljob.perf.workload.workload import REAL_NBYTES, Workload
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES, repeated, update_part_s
from dljob.planner.candidates.evaluate import Part, describe
from dljob.planner.candidates.options import link_of, overlap_of
from dljob.planner.candidates.strategies.measured_steps import NO_EVIDENCE, evidence
from dljob.planner.candidates.strategies.model_split import SplitStep, prediction_of, step_s_of
from dljob.planner.types import Prediction, Request
from dljob.planner.types.texts import rate

SCATTERED = 8.0
"""Bytes that the heap of a rank of ``fully_shard`` on CPUs loses for a byte of the model's parameters.

A gathered unit has another place in each step, and its freed block is too small for the next unit (docs/design/0016).
The trainer sets how torch allocates (``dltrain.host.heap``), but not for scripts that reduce by themselves."""
MAPPED_NBYTES = 32 * 2**20
"""Size in bytes above which glibc never places a tensor in the heap."""


@dataclass(frozen=True)
class ZeroCandidate:
    """A candidate plan whose ranks (``part``) shard gradients (stage 2), or also parameters (stage 3)."""

    part: Part
    stage: Literal[2, 3]
    micro_batches: int

    def describe(self) -> str:
        """Return a text such as '4 x a100 (8 ranks each), ZeRO-3, 2 micro-batches'."""
        accumulated = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{describe([self.part])}, ZeRO-{self.stage}{accumulated}"


def held_nbytes(
    workload: Workload, stage: zero.Stage, ranks: int, samples: int, device: Device, request: Request
) -> float:
    """Return the memory in bytes of the rank that needs the most of ``ranks`` ranks on ``device``.

    ``stage``: stage of ZeRO, which says what the ranks shard. ``samples``: samples of a rank in a micro-batch. With
    stage 3 on CPUs, it is the larger of two amounts: that of the start, when each rank creates the whole model before
    it keeps a part (``_created_nbytes``), and that of training with the copy of the part that it writes to a
    checkpoint, and what the heap loses (``_lost_nbytes``).
    """
    kept = samples * (workload.activation_nbytes + memory.PREFETCHED_BATCHES * workload.sample_nbytes)
    state = zero.state_nbytes(workload, stage, ranks)
    is_gpu, growth = device.kind == "gpu", device.growth_factors
    largest, convolves = samples * workload.transient_nbytes, workload.has_convolutions
    training = memory.held_nbytes(state, kept, largest, is_gpu, growth, convolves)
    training += memory.frozen_nbytes(zero.frozen_nbytes(workload, stage, ranks), is_gpu)
    if is_gpu or stage < 3:
        return max(training, memory.start_nbytes(workload, is_gpu))
    whole = memory.held_nbytes(0.0, 0.0, 0.0, is_gpu, growth, convolves)
    part = (REAL_NBYTES * workload.parameters + workload.frozen_nbytes) / ranks
    created, loading = _created_nbytes(workload, ranks, request)
    whole += memory.MARGIN * max(created + part, loading)
    return max(
        whole, training + memory.MARGIN * copied_nbytes(workload, ranks, request) + _lost_nbytes(workload, request)
    )


def _lost_nbytes(workload: Workload, request: Request) -> float:
    """Return the bytes that the heap of a rank on CPUs loses between the units that it gathers."""
    gathered = zero.unit_nbytes(workload) * zero.element_nbytes(workload) / REAL_NBYTES
    if not request.reduced_by_script or (zero.knows_units(workload) and gathered > MAPPED_NBYTES):
        return 0.0
    return SCATTERED * (REAL_NBYTES * workload.parameters + workload.frozen_nbytes)


def _created_nbytes(workload: Workload, ranks: int, request: Request) -> tuple[float, float]:
    """Return (bytes of the parameters that a rank creates at once, bytes while it loads the weights of a base).

    Ranks create the whole model, or with deferred initialization a unit after the other, beside which there are the
    tensor that rank 0 sends and the padded copy of the rank's part. The loaded weights then stay until all units have
    their values.
    """
    if request.deferred_init and ranks > 1:
        return 2 * zero.unit_nbytes(workload) + workload.loading_nbytes / 2, 0.0
    return REAL_NBYTES * workload.parameters + workload.frozen_nbytes, workload.loading_nbytes


def copied_nbytes(workload: Workload, ranks: int, request: Request) -> float:
    """Return the bytes of state that a rank copies to main memory for a checkpoint, with stage 3 on ``ranks`` ranks."""
    return workload.checkpoint_nbytes / ranks if request.checkpoints else 0.0


def candidate(part: Part, stage: Literal[2, 3], request: Request, workload: Workload) -> ZeroCandidate | None:
    """Return the candidate with the fewest micro-batches that fits into memory; None if none does.

    ``part``: the nodes and ranks of the candidate. ``stage``: stage of ZeRO. The number of micro-batches is the user's,
    unless the planner may choose it.
    """
    local = ceil(request.global_batch / part.ranks)
    if request.global_batch < part.ranks:
        return None
    largest = _largest(part, stage, request, workload)
    k = ceil(local / largest) if largest >= 1 else MAX_MICRO_BATCHES + 1
    asked = min(request.micro_batches, local)
    if k > (MAX_MICRO_BATCHES if request.chooses_micro_batches else asked):
        return None
    return ZeroCandidate(part, stage, k if request.chooses_micro_batches else asked)


def _largest(part: Part, stage: Literal[2, 3], request: Request, workload: Workload) -> int:
    """Return the most samples in a micro-batch with which a rank fits into memory; 0 if it fits with none.

    The result is at most the local batch size.
    """
    option, local = part.option, ceil(request.global_batch / part.ranks)

    def fits(samples: int) -> bool:
        held = held_nbytes(workload, stage, part.ranks, samples, option.device, request)
        return held <= option.memory_nbytes

    return bisect_left(range(1, local + 1), True, key=lambda samples: not fits(samples))


def predict(found: ZeroCandidate, request: Request, workload: Workload) -> Prediction:
    """Predict the step time, memory, energy and cost of a candidate that fits into memory."""
    part, option, k, n = found.part, found.part.option, found.micro_batches, found.part.ranks
    local = ceil(request.global_batch / n)
    samples = ceil(local / k)
    held = int(held_nbytes(workload, found.stage, n, samples, option.device, request))
    host = host_nbytes(found, request, workload, samples, held)
    writers = n if found.stage == 3 else 1
    known, step = NO_EVIDENCE, _step(found, request.global_batch, workload)
    if found.stage == 3:

        def predicted_s(point: SplitPoint, on: Part) -> float:
            measured = ZeroCandidate(on, 3, point.micro_batches)
            return step_s_of(on, _step(measured, point.batch, point.workload or workload))

        place = Place(part.nodes, option.ranks_per_node)
        predicted = SplitPoint("Sharded", place, request.global_batch, step_s_of(part, step), k)
        known = evidence(part, predicted, predicted_s, is_script=request.model is None)
    return prediction_of(part, step, request, workload, local, held, host, writers, known)


def _step(found: ZeroCandidate, batch: int, workload: Workload) -> SplitStep:
    """Return the predicted step of ``batch`` samples of all ranks."""
    part, option, k, n = found.part, found.part.option, found.micro_batches, found.part.ranks
    local = ceil(batch / n)
    samples, update_s = ceil(local / k), update_part_s(option)
    computing_s = repeated(option.computing, k, update_s).seconds(local)
    busy_s = computing_s - update_s * (1 - 1 / n)  # each rank updates its part of the parameters
    link, spread = link_of([option], [part.nodes])
    moving_s = zero.exposed_communication_s(
        workload, found.stage, n, link, part.nodes, (computing_s - update_s) / k, k, overlap_of([option])
    )
    return SplitStep(
        busy_s=busy_s,
        mean_s=busy_s,
        moving_s=moving_s,
        text=f"ZeRO-{found.stage}: gathers and reductions over {link.name}, {rate(link.bandwidth_Bps)}",
        spread=spread,
        active=active_part(workload, option.device, samples),
    )


def host_nbytes(found: ZeroCandidate, request: Request, workload: Workload, samples: int, held: int) -> int:
    """Return the main memory in bytes of a pod whose ranks have ``samples`` samples and need ``held`` bytes each.

    For checkpoints, each GPU rank copies its shards to main memory. With stage 3, each rank first creates the model
    there (``_created_nbytes``), and each rank has a client of the object store if the checkpoints are in one.
    """
    part, option = found.part, found.part.option
    if option.pool.is_gpu:
        held = _on_host_nbytes(found.stage, part.ranks, request, workload, samples)
    return _pod_nbytes(found.stage, option.ranks_per_node, option.pool.is_gpu, workload, held)


def least_host_nbytes(ranks: int, ranks_per_node: int, request: Request, workload: Workload) -> int:
    """Return the main memory in bytes that a pod needs on a GPU node with stage 3 and one sample on each rank."""
    return _pod_nbytes(3, ranks_per_node, True, workload, _on_host_nbytes(3, ranks, request, workload, 1))


def _pod_nbytes(stage: Literal[2, 3], ranks: int, is_gpu: bool, workload: Workload, each: int) -> int:
    """Return the main memory in bytes of a pod with ``ranks`` ranks that need ``each`` bytes of it."""
    clients = ranks if stage == 3 else 1
    fixed = memory.AGENT_NBYTES + clients * workload.beside_ranks_nbytes + memory.shm_nbytes(ranks, is_gpu)
    return fixed + ranks * each


def _on_host_nbytes(stage: Literal[2, 3], ranks: int, request: Request, workload: Workload, samples: int) -> int:
    """Return the main memory in bytes that one of ``ranks`` ranks on GPUs needs."""
    copies = (1 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters / ranks + workload.frozen_nbytes
    batches, loading = memory.PREFETCHED_BATCHES * samples * workload.sample_nbytes, workload.loading_nbytes
    if stage == 3:
        created, loading = _created_nbytes(workload, ranks, request)
        copies = max(created, copied_nbytes(workload, ranks, request))
    copies = max(copies, loading)
    return int(memory.GPU_PROCESS_NBYTES + memory.MARGIN * (copies + batches))
