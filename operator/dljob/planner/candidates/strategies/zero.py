"""Predicted step time and memory of plans with sharded gradients (ZeRO-2) or parameters (ZeRO-3), on equal ranks.

The trainer runs training scripts with ZeRO-3 in float32 (strategy Sharded), and no others yet. The plans have
the same number of samples on each rank, and as few micro-batches as the memory allows, because each micro-batch
repeats the communication.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from dljob.cluster.catalogue import Device
from dljob.perf.resources import memory
from dljob.perf.step import model_split as split
from dljob.perf.step import zero
from dljob.perf.workload.workload import REAL_NBYTES, Workload
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES, repeated, update_part_s
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


def held_nbytes(workload: Workload, stage: zero.Stage, ranks: int, samples: int, device: Device) -> float:
    """Return the memory in bytes of one of ``ranks`` ranks with ``samples`` samples in a micro-batch on ``device``.

    ``stage``: stage of ZeRO, which says what the ranks shard. With stage 3 on CPUs, the result includes parameters and
    optimizer state of the whole model: each rank first creates the whole model, and rank 0 gathers checkpoints.
    """
    kept = samples * (workload.activation_nbytes + memory.PREFETCHED_BATCHES * workload.sample_nbytes)
    state = zero.state_nbytes(workload, stage, ranks)
    is_gpu = device.kind == "gpu"
    if stage == 3 and not is_gpu:
        state += split.state_nbytes(workload)
    largest, convolves = samples * workload.transient_nbytes, workload.has_convolutions
    return memory.held_nbytes(state, kept, largest, is_gpu, device.growth_factors, convolves)


def candidate(part: Part, stage: Literal[2, 3], request: Request, workload: Workload) -> ZeroCandidate | None:
    """Return the candidate with the fewest micro-batches that fits into memory; None if none does.

    ``part``: the nodes and ranks of the candidate. ``stage``: stage of ZeRO. The number of micro-batches is the user's,
    unless the planner may choose it.
    """
    option, local = part.option, ceil(request.global_batch / part.ranks)
    if request.global_batch < part.ranks:
        return None
    empty, one = (held_nbytes(workload, stage, part.ranks, b, option.device) for b in (0, 1))
    largest = int(min(local, (option.memory_nbytes - empty) / max(one - empty, 1.0)))
    k = ceil(local / largest) if largest >= 1 else MAX_MICRO_BATCHES + 1
    asked = min(request.micro_batches, local)
    if k > (MAX_MICRO_BATCHES if request.chooses_micro_batches else asked):
        return None
    return ZeroCandidate(part, stage, k if request.chooses_micro_batches else asked)


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
    held = int(held_nbytes(workload, found.stage, n, samples, option.device))
    return prediction_of(part, step, request, workload, samples, held, host_nbytes(found, workload, samples, held))


def host_nbytes(found: ZeroCandidate, workload: Workload, samples: int, held: int) -> int:
    """Return the main memory in bytes of a pod whose ranks have ``samples`` samples and need ``held`` bytes each.

    For checkpoints, each GPU rank copies its shards to main memory. With stage 3, rank 0 gathers the whole state there,
    and each rank first creates the whole model in main memory.
    """
    part = found.part
    ranks, is_gpu = part.option.ranks_per_node, part.option.pool.is_gpu
    fixed = memory.AGENT_NBYTES + workload.beside_ranks_nbytes + memory.shm_nbytes(ranks, is_gpu)
    if not is_gpu:
        return fixed + ranks * held
    copies = (1 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters / part.ranks
    batches = memory.PREFETCHED_BATCHES * samples * workload.sample_nbytes
    if found.stage == 3:
        copies = max(REAL_NBYTES * workload.parameters, split.state_nbytes(workload) / ranks)
    return fixed + ranks * int(memory.GPU_PROCESS_NBYTES + memory.MARGIN * (copies + batches))
