"""What every rank of ``allreduce.py`` does: all candidates sum in turns; rank 0 prints their times as JSON."""

import ctypes
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dltrain.comm.autotuning import Auto
from dltrain.comm.core.collective import Collective
from dltrain.comm.core.shared_region import Region
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.selection import choose

TURN_S = 0.02
"""A turn repeats its sum for about so long."""
SEGMENT_NBYTES = 56 * 2**10
OURS, OPEN_MPI, SEGMENTED, GLOO = "auto", "Open MPI", "Open MPI's segmented ring", "gloo"
RING, SERVER = "ring", "parameter server"


def main() -> None:
    """Arguments: JSON with ``sizes``, ``rounds``, ``host`` (rank 0's address) and ``candidates``."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    world = ProcessGroup.start()
    rows = [measured(world, nbytes, asked) for nbytes in asked["sizes"]]
    if world.rank == 0:
        print(json.dumps(rows), flush=True)
    world.close()


def measured(world: ProcessGroup, nbytes: int, asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every candidate by round, the slowest rank's, and what ``auto`` chose."""
    from mpi4py import MPI

    ours: list[Collective] = []
    sums = {name: candidate(name, world, nbytes, asked["host"], ours) for name in asked["candidates"]}
    repeats = {name: _repeats(world, sum_once) for name, sum_once in sums.items()}
    times: dict[str, list[float]] = {name: [] for name in sums}
    for turn in range(asked["rounds"]):
        # Anew in every round, alike on all ranks: what a candidate leaves behind must not always hit the same next one.
        for name in random.Random(turn).sample(list(sums), len(sums)):
            world.comm.Barrier()
            began = time.perf_counter()
            for _ in range(repeats[name]):
                sums[name]()
            spent = (time.perf_counter() - began) / repeats[name]
            times[name].append(world.comm.allreduce(spent, MPI.MAX))
    picked = [str(pick) for own in ours if isinstance(own, Auto) for pick in own.picks.values()]
    for own in ours:
        own.close()
    return {"nbytes": nbytes, "seconds": times, "picked": picked}


def candidate(name: str, world: ProcessGroup, nbytes: int, host: str, made: list[Collective]) -> Callable[[], object]:
    """One sum of a buffer of its own, by ``name``; our collectives are added to ``made``."""
    from mpi4py import MPI

    count = nbytes // 4
    if name in (OPEN_MPI, SEGMENTED):
        buffer = torch.zeros(count).numpy()
        comm = world.comm if name == OPEN_MPI else segmented(world.comm)
        return lambda: comm.Allreduce(MPI.IN_PLACE, buffer)
    region = Region.make(world.comm, nbytes) if name == OURS else None
    memory = region.empty(count, torch.float32) if region is not None else torch.zeros(count)
    strategy = {OURS: "Auto", GLOO: "Torch", RING: "Ring", SERVER: "ParameterServer"}[name]
    servers = (world.size - 1,)
    made.append(
        choose(strategy, world.comm, [memory], segment_nbytes=SEGMENT_NBYTES, servers=servers, host=host, region=region)
    )
    return lambda own=made[-1]: own.allreduce(0)  # type: ignore[misc]


def segmented(comm: Any) -> Any:
    """A communicator on which Open MPI sums by its segmented ring, whatever the size; others stay as they are.

    Variables of the ``tuned`` component count when a communicator is made, so they are set for that moment.
    """
    library = ctypes.CDLL(None)
    library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int()))
    values = {
        "coll_tuned_use_dynamic_rules": 1,
        "coll_tuned_allreduce_algorithm": 5,
        "coll_tuned_allreduce_algorithm_segmentsize": 128 * 2**10,
    }
    before = {name: _variable(library, name, value) for name, value in values.items()}
    made = comm.Dup()
    for name, value in before.items():
        _variable(library, name, value)
    return made


def _variable(library: Any, name: str, value: int) -> int:
    """Set one of Open MPI's variables; returns what it was."""
    index, handle, count, before = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    for code in (
        library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)),
        library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)),
        library.MPI_T_cvar_read(handle, ctypes.byref(before)),
        library.MPI_T_cvar_write(handle, ctypes.byref(ctypes.c_int(value))),
        library.MPI_T_cvar_handle_free(ctypes.byref(handle)),
    ):
        if code:
            raise RuntimeError(
                f"{name}: found error {code} of MPI's tool interface, expected Open MPI 5 to take {value}"
            )
    return before.value


def _repeats(world: ProcessGroup, sum_once: Callable[[], object]) -> int:
    """As many repetitions as fit a turn, the same on every rank."""
    sum_once()
    began = time.perf_counter()
    sum_once()
    took_s: float = world.comm.bcast(time.perf_counter() - began)
    return max(1, round(TURN_S / took_s))


if __name__ == "__main__":
    main()
