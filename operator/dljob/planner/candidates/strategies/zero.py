"""Predicted step time and memory of plans with sharded gradients (ZeRO-2) or parameters (ZeRO-3), on equal ranks.

The trainer runs training scripts with ZeRO-3 in float32 (strategy Sharded), and no others yet. The plans have
the same number of samples on each rank, and as few micro-batches as the memory allows, because each micro-batch
repeats the communication.

With stage 3, each rank writes its part of a checkpoint on a volume, which all ranks see. In an object store, rank 0
gathers the whole state for each checkpoint. When ranks resume, each one reads only its part of a checkpoint on a
volume, or receives one whole tensor at a time, so that they then need less memory than for the next checkpoint.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil
from typing import Literal

from dljob.cluster.catalogue import Device
from dljob.perf.resources import memory
from dljob.perf.step import model_split as split
from dljob.perf.step import zero
from dljob.perf.step.communication import scatter_gather_s
from dljob.perf.workload.workload import REAL_NBYTES, Workload
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES, repeated, update_part_s
from dljob.planner.candidates.cost.interrupted import RANK_0_HAS_THE_STATE, Writing
from dljob.planner.candidates.evaluate import Part, describe
from dljob.planner.candidates.options import link_of, overlap_of
from dljob.planner.candidates.strategies.model_split import SplitStep, prediction_of
from dljob.planner.types import Prediction, Request
from dljob.planner.types.texts import rate


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
    it keeps a part, and that of training with the copy of the state that rank 0 writes to a checkpoint.
    """
    kept = samples * (workload.activation_nbytes + memory.PREFETCHED_BATCHES * workload.sample_nbytes)
    state = zero.state_nbytes(workload, stage, ranks)
    is_gpu, growth = device.kind == "gpu", device.growth_factors
    largest, convolves = samples * workload.transient_nbytes, workload.has_convolutions
    training = memory.held_nbytes(state, kept, largest, is_gpu, growth, convolves)
    if is_gpu or stage < 3:
        return training
    whole = memory.held_nbytes(0.0, 0.0, 0.0, is_gpu, growth, convolves)
    whole += memory.MARGIN * REAL_NBYTES * workload.parameters * (1 + 1 / ranks)
    return max(whole, training + memory.MARGIN * copied_nbytes(workload, ranks, request))


def copied_nbytes(workload: Workload, ranks: int, request: Request) -> float:
    """Return the bytes of state that rank 0 copies to main memory for a checkpoint, with stage 3 on ``ranks`` ranks.

    That is its part of the state if the checkpoints are on a volume, and the whole state, which it gathers, if they are
    in an object store.
    """
    if not request.checkpoints:
        return 0.0
    return split.state_nbytes(workload) / (1 if request.checkpoints_in_store else ranks)


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
    samples, update_s = ceil(local / k), update_part_s(option)
    computing_s = repeated(option.computing, k, update_s).seconds(local)
    busy_s = computing_s - update_s * (1 - 1 / n)  # each rank updates its part of the parameters
    link, spread = link_of([option], part.nodes)
    moving_s = zero.exposed_communication_s(
        workload, found.stage, n, link, part.nodes, (computing_s - update_s) / k, k, overlap_of([option])
    )
    step = SplitStep(
        busy_s=busy_s,
        mean_s=busy_s,
        moving_s=moving_s,
        text=f"ZeRO-{found.stage}: gathers and reductions over {link.name}, {rate(link.bandwidth_Bps)}",
        spread=spread,
    )
    held = int(held_nbytes(workload, found.stage, n, samples, option.device, request))
    host = host_nbytes(found, request, workload, samples, held)
    writing = _writing(found, request, workload) if found.stage == 3 else RANK_0_HAS_THE_STATE
    return prediction_of(part, step, request, workload, samples, held, host, writing)


def _writing(found: ZeroCandidate, request: Request, workload: Workload) -> Writing:
    """Return how the ranks of a candidate of stage 3 write a checkpoint."""
    part, n = found.part, found.part.ranks
    if not request.checkpoints_in_store:
        return Writing(ranks=n)
    if n == 1:
        return RANK_0_HAS_THE_STATE
    link, _ = link_of([part.option], part.nodes)
    tensors = max(1, round((1 + workload.optimizer_slots) * len(workload.layers)))
    _, gather_s = scatter_gather_s(split.state_nbytes(workload), float(n), link, tensors, part.nodes)
    return Writing(gathering_s=float(gather_s))


def host_nbytes(found: ZeroCandidate, request: Request, workload: Workload, samples: int, held: int) -> int:
    """Return the main memory in bytes of a pod whose ranks have ``samples`` samples and need ``held`` bytes each.

    For checkpoints, each GPU rank copies its shards to main memory. With stage 3, each rank first creates the whole
    model there, and rank 0 gathers the whole state there for checkpoints in an object store.
    """
    part = found.part
    ranks, is_gpu = part.option.ranks_per_node, part.option.pool.is_gpu
    fixed = memory.AGENT_NBYTES + workload.beside_ranks_nbytes + memory.shm_nbytes(ranks, is_gpu)
    if not is_gpu:
        return fixed + ranks * held
    copies = (1 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters / part.ranks
    batches = memory.PREFETCHED_BATCHES * samples * workload.sample_nbytes
    if found.stage == 3:
        # Pods are equal, so each one has room for the state that rank 0 gathers in one of them.
        shared = ranks if request.checkpoints_in_store else 1
        copied = copied_nbytes(workload, part.ranks, request) / shared
        copies = max(REAL_NBYTES * workload.parameters, copied)
    return fixed + ranks * int(memory.GPU_PROCESS_NBYTES + memory.MARGIN * (copies + batches))
