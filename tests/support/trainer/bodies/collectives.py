"""On every rank: each strategy sums buffers of many sizes, several times, as numpy would."""

import sys
import time

import numpy as np
import torch

from dlcontract import COLLECTIVES
from dltrain.comm import autotuning
from dltrain.comm.algorithms.shared_memory import SharedMemory
from dltrain.comm.autotuning import Auto, Pick, size_class
from dltrain.comm.core.collective import Collective, Work
from dltrain.comm.core.shared_region import Memory
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.schedules.ring import Ring
from dltrain.comm.selection import choose

SIZES = (1, 2, 3, 5, 17, 1000, 4099, 70_001)
SEGMENT_NBYTES = 4096


def values(rank: int, size: int, turn: int, dtype: torch.dtype) -> np.ndarray:
    return (
        np.random.default_rng([rank, size, turn])
        .standard_normal(size)
        .astype(torch.empty(0, dtype=dtype).numpy().dtype)
    )


def check(world: ProcessGroup, name: str, dtype: torch.dtype) -> None:
    memory = Memory(world.comm if name in ("Auto", "SharedMemory") else None)
    buffers = list(memory.zeros(sum(SIZES), dtype, torch.device("cpu")).split(SIZES))
    servers = (world.size - 1,) if world.size < 4 else (0, 2)
    collective: Collective
    if name == "SharedMemory":
        assert memory.region is not None, "ranks of one machine share memory"
        collective = SharedMemory(world.comm.Dup(), buffers, memory.region)
    else:
        collective = choose(
            name, world.comm, buffers, segment_nbytes=SEGMENT_NBYTES, servers=servers, region=memory.region
        )
    assert collective.name == name, (collective.name, name)
    for turn in range(3):
        for buffer, size in zip(buffers, SIZES, strict=True):
            buffer.copy_(torch.from_numpy(values(world.rank, size, turn, dtype)))
        works = [collective.start(index) for index in range(len(buffers))]  # all under way at once
        waiting = list(works) if turn == 1 else []  # once by polling, else by waiting
        while waiting:
            waiting = [work for work in waiting if not work.test()]
        for work in works:
            work.wait()
        for buffer, size in zip(buffers, SIZES, strict=True):
            exact = sum(values(rank, size, turn, dtype).astype(np.float64) for rank in range(world.size))
            tolerance = 1e-5 if dtype is torch.float32 else 1e-13
            np.testing.assert_allclose(buffer.numpy(), exact, rtol=0, atol=tolerance, err_msg=f"{name} {size} {turn}")
            mine = buffer.numpy().tobytes()
            assert world.broadcast(mine) == mine, f"{name}: ranks differ at size {size}"
    collective.close()


class Slow(Ring):
    """Right, but never the fastest."""

    name = "Slow"

    def start(self, index: int) -> Work:
        time.sleep(0.02)
        return super().start(index)


def check_choice(world: ProcessGroup) -> None:
    """The fastest strategy is picked on all ranks; another run's picks are taken where they fit."""

    def make(comm: object, buffers: list[torch.Tensor], pick: Pick) -> Collective:
        return (Slow if pick.strategy == "Slow" else Ring)(comm, buffers, SEGMENT_NBYTES)

    autotuning.BUDGET_S = 0.25
    buffers = [torch.zeros(1000), torch.zeros(70_000)]
    sizes = {size_class(buffer.nbytes) for buffer in buffers}
    collective = Auto(world.comm.Dup(), buffers, make, [Pick("Slow"), Pick("Ring", SEGMENT_NBYTES)])
    picked = {number: pick.strategy for number, pick in collective.picks.items()}
    assert picked == dict.fromkeys(sizes, "Ring"), picked
    assert all(pick.bandwidth_Bps > 0 for pick in collective.picks.values())
    collective.reuse(dict.fromkeys(sizes, Pick("Slow")))
    buffers[1].fill_(1)
    began = time.perf_counter()
    collective.allreduce(1)
    assert time.perf_counter() - began >= 0.02 and bool((buffers[1] == world.size).all())
    collective.reuse(dict.fromkeys(sizes, Pick("Unknown")))
    collective.reuse({})
    assert {pick.strategy for pick in collective.picks.values()} == {"Slow"}
    collective.close()


def check_waiting(world: ProcessGroup) -> None:
    """A rank that waits for a slow one leaves the CPU to others."""
    collective = choose("Ring", world.comm, [torch.ones(1000)], segment_nbytes=SEGMENT_NBYTES)
    world.sum([0])
    began, cpu_began = time.perf_counter(), time.process_time()
    if world.rank == 0:
        time.sleep(1)  # the slow one
    collective.allreduce(0)
    waited_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    assert waited_s > 0.9 and cpu_s < 0.25 * waited_s, (waited_s, cpu_s)
    collective.close()


def main() -> None:
    world = ProcessGroup.start()
    world.expect(int(sys.argv[1]))
    autotuning.BUDGET_S = 0.01
    for name in (*COLLECTIVES, "SharedMemory", "Auto"):
        for dtype in (torch.float32, torch.float64)[: 1 if name == "Auto" else 2]:
            check(world, name, dtype)
    check_choice(world)
    check_waiting(world)
    total = world.sum([world.rank, 1])
    assert total == [sum(range(world.size)), world.size]
    assert world.gather([world.rank, 7]) == [[rank, 7] for rank in range(world.size)]
    part = world.split([rank != world.size - 1 for rank in range(world.size)])
    assert part.size == (1 if world.rank == world.size - 1 else world.size - 1)
    world.close()
    if world.rank == 0:
        sys.stdout.write("all sums right\n")


main()
