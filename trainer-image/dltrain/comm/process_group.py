"""The ranks of this run: MPI's start and end, and the few small exchanges besides gradients.

MPI starts only here, and only when this process was started by mpirun: plain ``python`` is a world of one without it.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dltrain.comm.core.fault_tolerance import agree, revoke, shrink, translate
from dltrain.comm.core.waiting import event_queues, listen, reduce_timer_slack, wait_until
from dltrain.protocol.errors import BadInputError

_SETTINGS = {
    # The wheel of mpi4py serves several MPI libraries; without a choice it may pick another and start n worlds of one.
    "MPI4PY_MPIABI": "openmpi",
    # What waits inside MPI (its start, a barrier) yields instead of burning a CPU that another rank needs.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Reading another process's memory needs a permission that containers may lack.
    "OMPI_MCA_smsc": "^cma",
}
_TOLERANT = "OMPI_MCA_mpi_ft_enable"
"""Set by mpirun for its ranks."""
_TRANSPORTS = "OMPI_MCA_btl"
SLICE_NBYTES = 2**18
"""Of what is sent at once outside of sums. Open MPI moves a message by a fragment or two each time that it is asked,
and whoever waits asks ever less often: in shared memory 90 MB went at 90 MB/s in slices of 16 MiB, at 870 in these."""


class ProcessGroup:
    """This rank among ``size`` ranks. ``comm``: mpi4py's communicator, None in a world of one without MPI."""

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank() if comm is not None else 0
        self.size: int = comm.Get_size() if comm is not None else 1
        self._whole = True

    @classmethod
    def start(cls) -> "ProcessGroup":
        """Join the world that mpirun made. Reads the environment."""
        if "OMPI_COMM_WORLD_SIZE" not in os.environ:
            return cls()
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        find_mpi()
        reduce_timer_slack()
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        others = set() if MPI.Is_initialized() else event_queues()
        if not MPI.Is_initialized():
            # The writer of checkpoints is a thread, but never calls MPI. Backward on a GPU runs in torch's thread, from
            # where batch norm does, while this one waits for it.
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
        world = cls(MPI.COMM_WORLD.Dup())
        shared_memory = world.local_size > 1 and "sm" in os.environ.get(_TRANSPORTS, "sm").split(",")
        listen(event_queues() - others, all_ring=not shared_memory)
        return world

    def expect(self, ranks: int) -> None:
        """Raise BadInputError unless this world has as many ranks as the plan."""
        if self.size != ranks:
            launched = os.environ.get("OMPI_COMM_WORLD_SIZE", "none, this process was not started by mpirun")
            raise BadInputError(
                "plan.ranks",
                f"a world of {self.size} (mpirun's count: {launched})",
                f"{ranks} ranks",
                f"start it with mpirun -n {ranks}, of the Open MPI that mpi4py uses",
            )

    def split(self, chosen: Sequence[bool]) -> "ProcessGroup":
        """This rank's part of the world: the ranks for which ``chosen`` says the same as for this one."""
        if self.comm is None or all(chosen):
            return self
        return ProcessGroup(self.comm.Split(int(chosen[self.rank]), self.rank))

    @property
    def survives(self) -> bool:
        """Whether ranks can go on when others die: only under ``mpirun --with-ft ulfm``, else mpirun ends them all."""
        return self.comm is not None and os.environ.get(_TOLERANT) == "1"

    def agree(self, mine: bool) -> bool:
        """Whether ``mine`` holds on all ranks and all of them live; every one that lives gets the same answer."""
        return agree(self.comm, mine)

    def shrink(self) -> None:
        """Become the world of the ranks that live, numbered anew in the same order. All of them call it.

        Raises PeerLostError.
        """
        revoke(self.comm)
        self.comm = shrink(self.comm)
        self._whole = False
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in double precision. Raises PeerLostError."""
        return [float(value) for value in self.add(np.array(values, dtype=np.float64))]

    def add(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Element-wise sum over ranks. Raises PeerLostError."""
        total = values.copy()
        if self.comm is not None and self.size > 1:
            from mpi4py import MPI

            self._wait(lambda: self.comm.Iallreduce(MPI.IN_PLACE, total))
        return total

    def collect(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, however many each has. Raises PeerLostError."""
        if self.comm is None or self.size == 1:
            return [data]
        counts = [int(count) for (count,) in self.gather([len(data)])]
        ends = [sum(counts[: rank + 1]) for rank in range(self.size)]
        content = np.empty(ends[-1], np.uint8)
        mine = np.frombuffer(data, dtype=np.uint8)
        self._wait(lambda: self.comm.Iallgatherv(mine, [content, counts]))
        return [content[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values (as many on each), by rank. Raises PeerLostError."""
        mine = np.array(values, dtype=np.float64)
        everyone = np.empty((self.size, len(mine)))
        everyone[self.rank] = mine
        if self.comm is not None and self.size > 1:
            self._wait(lambda: self.comm.Iallgather(mine, everyone))
        return [[float(value) for value in row] for row in everyone]

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """``root``'s bytes, on every rank; what others pass does not matter. Raises PeerLostError."""
        if self.comm is None or self.size == 1:
            return data
        length = np.array([len(data)], dtype=np.int64)
        self._wait(lambda: self.comm.Ibcast(length, root))
        content = np.empty(int(length[0]), np.uint8)
        if self.rank == root:
            content[:] = np.frombuffer(data, dtype=np.uint8)
        for begin in range(0, len(content), SLICE_NBYTES):
            self._wait(lambda part=content[begin : begin + SLICE_NBYTES]: self.comm.Ibcast(part, root))
        return content.tobytes()

    def _wait(self, begin: Any) -> None:
        from mpi4py import MPI

        try:
            request = begin()
            wait_until(request.Test)
        except MPI.Exception as error:
            raise translate(error) from error

    def close(self) -> None:
        """Leave together with all ranks. Raises PeerLostError."""
        if self.comm is not None:
            from mpi4py import MPI

            if not MPI.Is_finalized():
                self._wait(self.comm.Ibarrier)  # MPI's own end burns the CPU while rank 0 still writes
                if self._whole:
                    MPI.Finalize()  # hangs at times where ranks were lost, and what it tidies up the agents do

    def abandon(self) -> None:
        """Leave alone: wake the ranks that wait for this one, and do not wait for them. The process must exit next."""
        if self.comm is not None:
            revoke(self.comm)

    @property
    def local_size(self) -> int:
        """Ranks in this pod, or on this machine."""
        return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))


def find_mpi() -> None:
    """Load the wheel's MPI library, which mpi4py finds by itself only under mpirun. Starts nothing."""
    for folder in (Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"):
        library = folder / "libmpi.so.40"
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return
