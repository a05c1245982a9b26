"""A probe of the speed of this rank's device and links.

The probe runs before the first step and takes about a third of a second. Its results calibrate the operator's
performance model, and show whether the plan's local batch sizes suit the actual devices.
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from dlcontract import ProbePoint
from dltrain.batch.micro_batches import MicroBatches
from dltrain.batch.shares import fit, of_identical, worthwhile
from dltrain.comm.core.fault_tolerance import translate
from dltrain.comm.core.waiting import complete, wait_until
from dltrain.comm.process_group import ProcessGroup
from dltrain.device.rank_device import finish
from dltrain.protocol.rank_messages import Probed
from dltrain.train.trainer import Trainer

BUDGET_S = 0.3
QUOTA_BUDGET_S = 0.6
"""Time limit of the probe in seconds if a CPU quota has stalled the rank, or if its steps are slow.

It covers at least two whole periods of the quota.
"""
STALL_S = 2e-3
"""Minimum seconds that a step spends without the CPU to count as a stall, a pause that a CPU quota causes."""
_LINK_NBYTES = 2**20
_LINK_ROUNDS = 5

TrainStep = Callable[[nn.Module, Optimizer, int], None]
"""Function that runs one training step (forward, backward, update) of a model on the given number of samples."""


def probe_and_rebalance(trainer: Trainer, make_optimizer: Callable[[nn.Module], Optimizer], step: TrainStep) -> None:
    """Probe this rank and its links, report the results to the agent, and rebalance local batch sizes.

    The local batch sizes change only if this makes a step clearly faster (see ``shares.worthwhile``), and not if
    ``trainer.settled`` is true. Ranks on identical devices count as equally fast (see ``shares.of_identical``).
    ``make_optimizer``: creates an optimizer for a copy of the model. ``step``: runs one training step on a given number
    of samples. All ranks must call this function together.
    """
    micro_batches = MicroBatches(trainer.plan)
    share, count = micro_batches.largest(trainer.shares, trainer.rank), micro_batches.most(trainer.shares)
    # With micro-batches, a larger batch than a micro-batch does not fit into memory.
    batch = trainer.plan.global_batch if count == 1 else share
    as_planned = trainer.device_name == trainer.plan.ranks[trainer.rank].device
    points: list[tuple[int, float]] = []
    if share:
        twin = copy.deepcopy(trainer.model)  # the probe must not change the script's model
        points, trainer.budget.rate = compute_points(twin, make_optimizer(twin), step, share, batch)
        del twin
    on_cpu = trainer.device.type == "cpu"
    if not on_cpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(trainer.device)  # the reported peak must be that of training
    link = link_speed(trainer.process_group) if trainer.size > 1 and on_cpu else None
    trainer.reporter.send(
        Probed(
            rank=trainer.rank,
            points=tuple(ProbePoint(device=trainer.device_name, batch=b, compute_s=s) for b, s in points if as_planned),
            link_latency_s=link[0] if link else None,
            link_bandwidth_Bps=link[1] if link else None,
        )
    )
    if trainer.settled or trainer.workers == 1:
        return
    flat = [value for point in (points * 3)[:3] for value in point] if points else [0.0] * 6
    rows = [row for row in trainer.process_group.gather(flat) if row[0]]
    speeds = [fit([(int(row[i]), row[i + 1]) for i in (0, 2, 4)]) for row in rows]
    # A GPU can hold at least the batches of its probe. The memory of a CPU is not the limit.
    held = [trainer.plan.global_batch if on_cpu else count * int(max(row[::2])) for row in rows]
    workers = [rank for rank, share in enumerate(trainer.shares) if share]
    now = [trainer.shares[rank] for rank in workers]
    kinds = [(trainer.plan.ranks[rank].group, trainer.plan.ranks[rank].device) for rank in workers]
    measured = [speed.step_s(share) for speed, share in zip(speeds, now, strict=True)]
    speeds = list(of_identical(speeds, kinds, max(1, trainer.plan.global_batch // len(workers))))
    if (better := worthwhile(speeds, now, trainer.plan.global_batch, limits=held)) is not None:
        shares = dict(zip(workers, better, strict=True))
        ms = ", ".join(f"{1e3 * seconds:.1f}" for seconds in measured)
        why = f"the probe measured compute times of {ms} ms, in order of ranks"
        trainer.reshard([shares.get(rank, 0) for rank in range(trainer.size)], why)


def compute_points(
    model: nn.Module, optimizer: Optimizer, step: TrainStep, share: int, batch: int
) -> tuple[list[tuple[int, float]], float]:
    """Measure training steps. Return (list of (samples, seconds per step), fraction of a CPU that this rank got).

    ``step``: runs one training step of (model, optimizer, number of samples). ``share``: this rank's local batch size.
    ``batch``: global batch size. The function measures steps with half the share, the share and twice the share. It
    omits a size above the share that does not fit into the GPU's memory. If the first step is slow, it measures only
    the share. The first step also allocates memory and loads kernels, so its time counts only if it alone exceeds
    ``QUOTA_BUDGET_S`` seconds.

    Under a CPU quota, a process runs at full speed for a while and then stalls for the rest of a 100 ms period. A short
    measurement contains either no stall or a complete stall. On a CPU, the result is therefore the median CPU time of
    each size, divided by the fraction of a CPU that the rank got. With at least three stalls, the fraction is measured
    from the end of the first to the end of the last stall, and otherwise over the entire probe. On a GPU, the result is
    the median wall-clock time, and the fraction is 1.
    """
    device = next(model.parameters()).device
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    stalls: list[tuple[float, float]] = []

    def timed(samples: int) -> float:
        wall_s, began = time.perf_counter(), clock()
        step(model, optimizer, samples)
        finish(device)
        now_s, now = time.perf_counter(), clock()
        if now_s - wall_s - (now - began) > STALL_S:
            stalls.append((now_s, now))
        return now - began

    def holds(samples: int) -> bool:
        """Run a first step with ``samples`` samples, which also sets up kernels. Return True if the memory suffices."""
        try:
            timed(samples)
        except torch.OutOfMemoryError:
            if samples <= share:
                raise
        else:
            return True
        optimizer.zero_grad()
        torch.cuda.empty_cache()
        return False

    wall_began, cpu_began = time.perf_counter(), clock()
    sizes = sorted({max(1, share // 2), share, min(2 * share, batch)})
    timings: dict[int, list[float]] = {share: [timed(share)]}
    spent_s = time.perf_counter() - wall_began
    if timings[share][0] < BUDGET_S / 4 and spent_s < QUOTA_BUDGET_S / 4:
        sizes = [size for size in sizes if holds(size)]
        timings = {size: [] for size in sizes}
        while (
            not timings[sizes[-1]]
            or (spent_s := time.perf_counter() - wall_began) < BUDGET_S
            or (len(stalls) in (1, 2) and spent_s < QUOTA_BUDGET_S)
        ):
            for size in sizes:
                timings[size].append(timed(size))
    elif spent_s < QUOTA_BUDGET_S:
        timings = {share: [timed(share)]}  # the first step also set up memory, caches and kernels
    ends = [(wall_began, cpu_began), (time.perf_counter(), clock())] if len(stalls) < 3 else stalls
    rate = max(ends[-1][1] - ends[0][1], 1e-9) / (ends[-1][0] - ends[0][0])  # above 1 with several threads
    return [(size, max(median(times), 1e-9) / rate) for size, times in timings.items()], min(1.0, rate)


def link_speed(process_group: ProcessGroup) -> tuple[float, float]:
    """Return the latency in s and the bandwidth in B/s of the slowest link while each rank sends to the next rank.

    All ranks must call this function together, and get the same result.
    """
    small, large = (_exchange_s(process_group, nbytes) for nbytes in (8, _LINK_NBYTES))
    latency_s, large_s = (max(row[i] for row in process_group.gather([small, large])) for i in (0, 1))
    # If a rank lost its CPU during the small message, the large one may seem no slower.
    return latency_s, _LINK_NBYTES / max(large_s - latency_s, large_s / 2)


def _exchange_s(process_group: ProcessGroup, nbytes: int) -> float:
    from mpi4py import MPI

    outgoing, incoming = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    right, left = (process_group.rank + 1) % process_group.size, (process_group.rank - 1) % process_group.size
    times = []
    for _ in range(_LINK_ROUNDS + 1):
        began = time.perf_counter()
        try:
            requests = [process_group.comm.Irecv(incoming, left), process_group.comm.Isend(outgoing, right)]
            wait_until(partial(complete, requests))
        except MPI.Exception as error:
            raise translate(error) from error
        times.append(time.perf_counter() - began)
    return median(times[1:])  # the first one opens the connection
