"""Check on every rank that each all-reduce algorithm sums buffers of many sizes like numpy."""

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


def check(group: ProcessGroup, name: str, dtype: torch.dtype) -> None:
    memory = Memory(group.comm if name in ("Auto", "SharedMemory") else None)
    buffers = list(memory.zeros(sum(SIZES), dtype, torch.device("cpu")).split(SIZES))
    servers = (group.size - 1,) if group.size < 4 else (0, 2)
    collective: Collective
    if name == "SharedMemory":
        assert memory.region is not None, "ranks of one machine share memory"
        collective = SharedMemory(group.comm.Dup(), buffers, memory.region)
    else:
        collective = choose(
            name, group.comm, buffers, segment_nbytes=SEGMENT_NBYTES, servers=servers, region=memory.region
        )
    assert collective.name == name, (collective.name, name)
    for turn in range(3):
        for buffer, size in zip(buffers, SIZES, strict=True):
            buffer.copy_(torch.from_numpy(values(group.rank, size, turn, dtype)))
        works = [collective.start(index) for index in range(len(buffers))]  # all run at the same time
        waiting = list(works) if turn == 1 else []  # poll in one turn and wait in the others
        while waiting:
            waiting = [work for work in waiting if not work.test()]
        for work in works:
            work.wait()
        for buffer, size in zip(buffers, SIZES, strict=True):
            exact = sum(values(rank, size, turn, dtype).astype(np.float64) for rank in range(group.size))
            tolerance = 1e-5 if dtype is torch.float32 else 1e-13
            np.testing.assert_allclose(buffer.numpy(), exact, rtol=0, atol=tolerance, err_msg=f"{name} {size} {turn}")
            bits = buffer.numpy().tobytes()
            assert group.broadcast(bits) == bits, f"{name}: ranks differ at size {size}"
    collective.close()


class Slow(Ring):
    """A correct algorithm that is never the fastest."""

    name = "Slow"

    def start(self, index: int) -> Work:
        time.sleep(0.02)
        return super().start(index)


def check_choice(group: ProcessGroup) -> None:
    """Check that all ranks choose the fastest algorithm and reuse valid choices of another run."""

    def make(comm: object, buffers: list[torch.Tensor], pick: Pick) -> Collective:
        return (Slow if pick.strategy == "Slow" else Ring)(comm, buffers, SEGMENT_NBYTES)

    autotuning.BUDGET_S = 0.25
    buffers = [torch.zeros(1000), torch.zeros(70_000)]
    sizes = {size_class(buffer.nbytes) for buffer in buffers}
    collective = Auto(group.comm.Dup(), buffers, make, [Pick("Slow"), Pick("Ring", SEGMENT_NBYTES)])
    picked = {number: pick.strategy for number, pick in collective.picks.items()}
    assert picked == dict.fromkeys(sizes, "Ring"), picked
    assert all(pick.bandwidth_Bps > 0 for pick in collective.picks.values())
    collective.reuse(dict.fromkeys(sizes, Pick("Slow")))
    buffers[1].fill_(1)
    began = time.perf_counter()
    collective.allreduce(1)
    assert time.perf_counter() - began >= 0.02 and bool((buffers[1] == group.size).all())
    collective.reuse(dict.fromkeys(sizes, Pick("Unknown")))
    collective.reuse({})
    assert {pick.strategy for pick in collective.picks.values()} == {"Slow"}
    collective.close()


def check_waiting(group: ProcessGroup) -> None:
    """Check that a rank that waits for a straggler uses little CPU time."""
    collective = choose("Ring", group.comm, [torch.ones(1000)], segment_nbytes=SEGMENT_NBYTES)
    group.sum([0])
    began, cpu_began = time.perf_counter(), time.process_time()
    if group.rank == 0:
        time.sleep(1)  # the straggler
    collective.allreduce(0)
    waited_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    assert waited_s > 0.9 and cpu_s < 0.25 * waited_s, (waited_s, cpu_s)
    collective.close()


def main() -> None:
    group = ProcessGroup.start()
    group.expect(int(sys.argv[1]))
    autotuning.BUDGET_S = 0.01
    # LayeredServer is no all-reduce: its workers never get the sum. DDP is a strategy that uses the collective Torch.
    others = (name for name in COLLECTIVES if name not in ("LayeredServer", "DDP"))
    for name in (*others, "SharedMemory", "Auto"):
        for dtype in (torch.float32, torch.float64)[: 1 if name == "Auto" else 2]:
            check(group, name, dtype)
    check_choice(group)
    check_waiting(group)
    total = group.sum([group.rank, 1])
    assert total == [sum(range(group.size)), group.size]
    assert group.gather([group.rank, 7]) == [[rank, 7] for rank in range(group.size)]
    part = group.split([rank != group.size - 1 for rank in range(group.size)])
    assert part.size == (1 if group.rank == group.size - 1 else group.size - 1)
    group.close()
    if group.rank == 0:
        sys.stdout.write("all sums right\n")


main()
