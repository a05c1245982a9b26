"""Time the candidates of ``allreduce.py`` on every rank, in turns. Rank 0 prints the times as JSON."""

import ctypes
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from dltrain.comm.autotuning import Auto
from dltrain.comm.core.collective import Collective
from dltrain.comm.core.shared_region import Region
from dltrain.comm.core.waiting import complete, wait_until
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.selection import choose

TURN_S = 0.02
"""Approximate duration of a turn, which repeats one all-reduce."""
SEGMENT_NBYTES = 56 * 2**10
OURS, OPEN_MPI, SEGMENTED, GLOO = "auto", "Open MPI", "Open MPI's segmented ring", "gloo"
RING, SERVER = "ring", "parameter server"
HALVING, BUTTERFLY = "halving-doubling", "butterfly"
EXCHANGE = "exchange"
"""Not an all-reduce: a message from each rank to the next."""
STRATEGIES = {
    OURS: "Auto", GLOO: "Torch", RING: "Ring", SERVER: "ParameterServer",
    HALVING: "HalvingDoubling", BUTTERFLY: "Butterfly",
}  # fmt: skip
"""Candidate → dljob's collective."""


def main() -> None:
    """Measure all sizes. The argument is JSON with ``sizes``, ``rounds``, ``host`` (of rank 0) and ``candidates``."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    process_group = ProcessGroup.start()
    rows = [measured(process_group, nbytes, settings) for nbytes in settings["sizes"]]
    if process_group.rank == 0:
        print(json.dumps(rows), flush=True)
    process_group.close()


def measured(process_group: ProcessGroup, nbytes: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the slowest rank's seconds by candidate and round, and the algorithms that ``auto`` chose."""
    from mpi4py import MPI

    ours: list[Collective] = []
    allreduces = {
        name: candidate(name, process_group, nbytes, settings["host"], ours) for name in settings["candidates"]
    }
    repeats = {name: _repeats(process_group, sum_once) for name, sum_once in allreduces.items()}
    times: dict[str, list[float]] = {name: [] for name in allreduces}
    for turn in range(settings["rounds"]):
        # Use a new order in every round, the same on all ranks, so that no candidate always runs after the same one.
        for name in random.Random(turn).sample(list(allreduces), len(allreduces)):
            process_group.comm.Barrier()
            began = time.perf_counter()
            for _ in range(repeats[name]):
                allreduces[name]()
            spent = (time.perf_counter() - began) / repeats[name]
            times[name].append(process_group.comm.allreduce(spent, MPI.MAX))
    picked = [str(pick) for own in ours if isinstance(own, Auto) for pick in own.picks.values()]
    for own in ours:
        own.close()
    return {"nbytes": nbytes, "seconds": times, "picked": picked}


def candidate(
    name: str, process_group: ProcessGroup, nbytes: int, host: str, made: list[Collective]
) -> Callable[[], object]:
    """Return a function that all-reduces its own buffer with ``name``. Append dljob's collectives to ``made``."""
    from mpi4py import MPI

    count = nbytes // 4
    if name == EXCHANGE:
        return partial(exchange, process_group, np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8))
    if name in (OPEN_MPI, SEGMENTED):
        buffer = torch.zeros(count).numpy()
        comm = process_group.comm if name == OPEN_MPI else segmented(process_group.comm)
        return lambda: comm.Allreduce(MPI.IN_PLACE, buffer)
    region = Region.make(process_group.comm, nbytes) if name == OURS else None
    memory = region.empty(count, torch.float32) if region is not None else torch.zeros(count)
    strategy = STRATEGIES[name]
    servers = (process_group.size - 1,)
    made.append(
        choose(
            strategy,
            process_group.comm,
            [memory],
            segment_nbytes=SEGMENT_NBYTES,
            servers=servers,
            host=host,
            region=region,
        )
    )
    return lambda own=made[-1]: own.allreduce(0)  # type: ignore[misc]


def exchange(process_group: ProcessGroup, outgoing: Any, incoming: Any) -> None:
    """Send a buffer to the next rank while one comes from the previous rank, as in dltrain's probe of the link."""
    right, left = (process_group.rank + 1) % process_group.size, (process_group.rank - 1) % process_group.size
    requests = [process_group.comm.Irecv(incoming, left), process_group.comm.Isend(outgoing, right)]
    wait_until(partial(complete, requests))


RING_ALGORITHM, SEGMENTED_ALGORITHM = 4, 5
"""Numbers of Open MPI's all-reduces in ``coll_tuned_allreduce_algorithm``: its ring, and its ring in segments."""


def segmented(comm: Any) -> Any:
    """Return a communicator on which Open MPI always all-reduces with its segmented ring."""
    return forced(comm, SEGMENTED_ALGORITHM, 128 * 2**10)


def forced(comm: Any, algorithm: int, segment_nbytes: int = 0) -> Any:
    """Return a communicator on which Open MPI always all-reduces with one of its algorithms, by its number.

    Open MPI reads the variables of the ``tuned`` component when it creates a communicator, so they are set only then.
    """
    library = ctypes.CDLL(None)
    library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int()))
    values = {
        "coll_tuned_use_dynamic_rules": 1,
        "coll_tuned_allreduce_algorithm": algorithm,
        "coll_tuned_allreduce_algorithm_segmentsize": segment_nbytes,
    }
    before = {name: _variable(library, name, value) for name, value in values.items()}
    made = comm.Dup()
    for name, value in before.items():
        _variable(library, name, value)
    return made


def _variable(library: Any, name: str, value: int) -> int:
    """Set a variable of Open MPI and return its previous value."""
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
                f"{name}: found error {code} of MPI's tool interface; expected Open MPI 5 to accept {value}"
            )
    return before.value


def _repeats(process_group: ProcessGroup, sum_once: Callable[[], object]) -> int:
    """Return the number of repetitions that fit in a turn, the same on every rank."""
    sum_once()
    began = time.perf_counter()
    sum_once()
    took_s: float = process_group.comm.bcast(time.perf_counter() - began)
    return max(1, round(TURN_S / took_s))


if __name__ == "__main__":
    main()
