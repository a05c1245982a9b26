"""Measure random networks on several ranks of this node: ``mpirun -n 4 python -m`` this module.

The ranks train as those of a job do: mpirun starts them, each has one core, and they all-reduce the gradients in
buckets, with a ring, during the backward pass. Each rank has the whole batch of the network, so that the computing is
that of one rank. Rank 0 prints a line for each network: elapsed seconds of a step, and watts or 0. ``measure`` starts
the ranks.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlcontract.hardware import MAX_RANK_COUNTS, ReferenceNet, StructuresOnRanks
from dlcontract.structures import MAX_RANK_NBYTES, on_ranks, structures

if TYPE_CHECKING:
    from dltrain.comm.process_group import ProcessGroup

BUCKET_NBYTES = 4 * 2**20
"""Maximum size of a bucket of gradients: that of jobs."""
BUDGET_S, FEWEST_STEPS, MOST_STEPS, WARM_UP_STEPS = 0.4, 4, 200, 2
LIMIT_S = 60.0
"""Maximum seconds for all networks on one number of ranks, with the start of the ranks."""
RANK_NBYTES = 320 * 2**20 + 2 * MAX_RANK_NBYTES
"""Memory that must be free for each rank: that of a process in plans, and of a network with what its kernels copy. A
container that exceeds its limit is killed, and all measurements with it."""


def rank_counts(cores: float, free_nbytes: int | None = None) -> list[int]:
    """Return the numbers of ranks to measure on a node with ``cores`` cores: powers of two, and the number of cores.

    There are at most ``MAX_RANK_COUNTS``, evenly spaced. A node with fewer than two cores has none. ``free_nbytes``:
    free memory, which may allow fewer ranks than there are cores; None: unknown.
    """
    most = int(cores) if free_nbytes is None else min(int(cores), free_nbytes // RANK_NBYTES)
    found = sorted({*(1 << i for i in range(1, most.bit_length())), most} - {0, 1})
    if len(found) <= MAX_RANK_COUNTS:
        return found
    return [found[round(i * (len(found) - 1) / (MAX_RANK_COUNTS - 1))] for i in range(MAX_RANK_COUNTS)]


def measure(
    count: int, cores: float, scratch: Path, limit_s: float, free_nbytes: int | None = None
) -> tuple[tuple[StructuresOnRanks, ...], str | None]:
    """Return the measurements on each number of ranks, and a note if some are missing.

    ``count``: number of networks that are measured on one core. ``cores``: cores of this node. ``scratch``: folder for
    temporary files. ``limit_s``: seconds after which no further ranks are started. ``free_nbytes``: free memory.
    """
    from dltrain.hardware_probe.node_link import of_ranks
    from dltrain.hardware_probe.structures import watts_of

    end, found = time.monotonic() + limit_s, list[StructuresOnRanks]()
    nets, counts = on_ranks(count), rank_counts(cores, free_nbytes)
    for ranks in counts:
        if (left_s := end - time.monotonic()) <= 0:
            return tuple(found), f"structures: no time was left for {ranks} ranks or more"
        command = ["dltrain.hardware_probe.structure_ranks", *map(str, nets)]
        try:
            lines = of_ranks(ranks, command, scratch, min(LIMIT_S, left_s)).splitlines()
            rows = [tuple(map(float, line.split())) for line in lines[-len(nets) :]]
            seconds, watts = zip(*rows, strict=True)
            found.append(StructuresOnRanks(ranks=ranks, s=seconds, watts=watts_of(watts)))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            return tuple(found), f"structures on {ranks} ranks: {type(error).__name__}: {error!s:.120}; not measured"
    if counts[-1:] != rank_counts(cores)[-1:]:
        return tuple(found), f"structures: {(free_nbytes or 0) / 2**30:.1f} GiB of free memory allow no more ranks"
    return tuple(found), None


def main(arguments: Sequence[str]) -> None:
    """Train the networks at these positions with the other ranks. Rank 0 prints seconds and watts for each."""
    import torch

    from dltrain.comm.process_group import ProcessGroup

    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = ProcessGroup.start()
    nets = structures(max(map(int, arguments)) + 1)
    for index in map(int, arguments):
        seconds, watts = timed(training_step(nets[index], group), measures_power=group.rank == 0)
        if group.rank == 0:
            sys.stdout.write(f"{max(seconds, 1e-7):.4g} {watts or 0.0:.3g}\n")
            sys.stdout.flush()
    group.close()


def training_step(net: ReferenceNet, group: "ProcessGroup") -> Callable[[float], float]:
    """Return a function that makes a training step of a network, in which the ranks of ``group`` sum the gradients.

    The function's argument is a number of this rank, and its result the mean of those of all ranks.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from dltrain.comm.selection import choose
    from dltrain.hardware_probe.networks import module, samples
    from dltrain.parallel.data_parallel import DataParallel

    model = module(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    parallel = DataParallel(
        model.parameters(), lambda buffers: choose("Ring", group.comm, buffers), BUCKET_NBYTES, tail=1
    )
    x, y = samples(net, net.batches[0], torch.device("cpu"))

    def run(own: float) -> float:
        parallel.begin(1 / group.size, [own])
        loss = cross_entropy(model(x).reshape(len(y), -1), y)
        loss.backward()  # type: ignore[no-untyped-call]
        (total,) = parallel.finish()
        optimizer.step()
        return total / group.size

    return run


def timed(step: Callable[[float], float], *, measures_power: bool) -> tuple[float, float | None]:
    """Return (lower quartile of the elapsed seconds of a step, power in watts or None).

    All ranks make as many steps, because they agree on the time of a step in the last one before those that count.
    """
    from dltrain.hardware_probe.structures import Power

    took_s = 0.0
    for _ in range(WARM_UP_STEPS):
        begin = time.perf_counter()
        step(0.0)
        took_s = time.perf_counter() - begin
    steps = min(MOST_STEPS, max(FEWEST_STEPS, int(BUDGET_S / max(step(took_s), 1e-9))))
    power, times = Power() if measures_power else None, list[float]()
    for _ in range(steps):
        begin = time.perf_counter()
        step(0.0)
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 4], power.watts() if power else None


if __name__ == "__main__":
    main(sys.argv[1:])
