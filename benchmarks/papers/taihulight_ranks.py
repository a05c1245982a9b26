"""Time the ways of ``taihulight.py`` to exchange one gradient layout on every rank, in turns. Rank 0 prints JSON.

Beside the seconds of each exchange, it has the processor seconds of all ranks, and those of the whole machine.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from benchmarks.training.ranks.allreduce import RING_ALGORITHM, forced

from dltrain.builtin.probe import link_speed
from dltrain.comm.core.fault_tolerance import duplicate
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.schedules.layered_server import LayeredBroadcast, LayeredGather
from dltrain.comm.selection import choose

SEGMENT_NBYTES = 56 * 2**10
SERVER, RING, SCATTERED, COPIED = "server", "ring", "ring per tensor", "ring with copies"
OPEN_MPI, FORCED = "Open MPI", "Open MPI's ring"
WAYS = (SERVER, RING, SCATTERED, COPIED, OPEN_MPI, FORCED)
MEASURES = ("seconds", "ranks_cpu_s", "machine_cpu_s")
"""Measures of an exchange: the slowest rank's time, the ranks' processor time, and that of the whole machine."""
Exchange = Callable[[], None]


def main() -> None:
    """Measure all layouts. The argument is JSON with ``layouts`` (name: sizes in elements) and ``rounds``."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    process_group = ProcessGroup.start()
    latency_s, bandwidth_Bps = link_speed(process_group)
    found = {name: measured(process_group, sizes, settings["rounds"]) for name, sizes in settings["layouts"].items()}
    if process_group.rank == 0:
        link = {"latency_s": latency_s, "bandwidth_Bps": bandwidth_Bps}
        print(json.dumps({"link": link, "found": found}), flush=True)
    process_group.close()


def machine_cpu_s() -> float:
    """Return the seconds that all processors of this machine have worked since its start, for any program.

    The work of the kernel's network, which no process has in its own account, is included.
    """
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, _steal = ticks
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measured(process_group: ProcessGroup, sizes: Sequence[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return each round's ``MEASURES`` by way. The first exchange of each way is not measured.

    Raise AssertionError if a sum is wrong.
    """
    from mpi4py import MPI

    ways, close = exchanges(process_group, sizes)
    found: dict[str, dict[str, list[float]]] = {name: {measure: [] for measure in MEASURES} for name in ways}
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(ways), len(ways)):
            process_group.comm.Barrier()
            machine_s, rank_s, began = machine_cpu_s(), time.process_time(), time.perf_counter()
            ways[name]()
            spent_s = process_group.comm.allreduce(time.perf_counter() - began, MPI.MAX)
            ranks_s = process_group.comm.allreduce(time.process_time() - rank_s)
            if turn:
                for measure, value in zip(MEASURES, (spent_s, ranks_s, machine_cpu_s() - machine_s), strict=True):
                    found[name][measure].append(value)
    close()
    return found


def exchanges(process_group: ProcessGroup, sizes: Sequence[int]) -> tuple[dict[str, Exchange], Callable[[], None]]:
    """Return the ways to exchange gradients of ``sizes`` elements, and a function that frees them."""
    from mpi4py import MPI

    comm, total = process_group.comm, sum(sizes)
    backward = list(reversed(sizes))
    # One buffer for all tensors. Only the copies need tensors of their own.
    flat, parts = torch.ones(total), [torch.ones(size) for size in backward]
    views = list(torch.split(flat, backward))
    gather = LayeredGather(duplicate(comm), views, SEGMENT_NBYTES, 0)
    broadcast = LayeredBroadcast(duplicate(comm), [flat], SEGMENT_NBYTES)
    ring = choose("Ring", comm, [flat], segment_nbytes=SEGMENT_NBYTES)
    scattered = choose("Ring", comm, views, segment_nbytes=SEGMENT_NBYTES)
    forced_comm = forced(comm, RING_ALGORITHM)

    def expect(value: float) -> None:
        assert float(flat[0]) == float(flat[-1]) == value, f"found {float(flat[0])}; expected {value}"

    def server() -> None:
        flat.fill_(float(process_group.rank > 0))  # the server does not train
        works = [gather.start(index) for index in range(len(views))]  # in the order of the backward pass
        for work in works:
            work.wait()
        if process_group.rank == 0:
            flat.div_(process_group.size - 1)  # the average, as the update
        broadcast.allreduce(0)
        expect(1.0)

    def contiguous() -> None:
        flat.fill_(1.0)
        ring.allreduce(0)
        expect(process_group.size)

    def per_tensor() -> None:
        flat.fill_(1.0)
        works = [scattered.start(index) for index in range(len(views))]
        for work in works:
            work.wait()
        expect(process_group.size)

    def copied() -> None:
        for part in parts:
            part.fill_(1.0)
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
        ring.allreduce(0)
        for view, part in zip(views, parts, strict=True):
            part.copy_(view)
        expect(process_group.size)

    def default() -> None:
        flat.fill_(1.0)
        comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        expect(process_group.size)

    def forced_ring() -> None:
        flat.fill_(1.0)
        forced_comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        expect(process_group.size)

    def close() -> None:
        for collective in (gather, broadcast, ring, scattered):
            collective.close()
        forced_comm.Free()

    return dict(zip(WAYS, (server, contiguous, per_tensor, copied, default, forced_ring), strict=True)), close


if __name__ == "__main__":
    main()
