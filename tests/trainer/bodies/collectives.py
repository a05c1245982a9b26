"""On every rank: each strategy sums buffers of many sizes, several times, as numpy would."""

import sys
import time

import numpy as np
import torch

from dltrain.comm.choose import NAMES, choose
from dltrain.world import World

SIZES = (1, 2, 3, 5, 17, 1000, 4099, 70_001)
SEGMENT_NBYTES = 4096


def values(rank: int, size: int, turn: int, dtype: torch.dtype) -> np.ndarray:
    return (
        np.random.default_rng([rank, size, turn])
        .standard_normal(size)
        .astype(torch.empty(0, dtype=dtype).numpy().dtype)
    )


def check(world: World, name: str, dtype: torch.dtype) -> None:
    buffers = [torch.empty(size, dtype=dtype) for size in SIZES]
    servers = (world.size - 1,) if world.size < 4 else (0, 2)
    collective = choose(name, world.comm, buffers, segment_nbytes=SEGMENT_NBYTES, servers=servers)
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


def check_waiting(world: World) -> None:
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
    world = World.start()
    world.expect(int(sys.argv[1]))
    for name in NAMES:
        for dtype in (torch.float32, torch.float64):
            check(world, name, dtype)
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
