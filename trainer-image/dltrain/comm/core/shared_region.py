"""Memory that all ranks of one machine share, with a part for each rank.

Each part is an anonymous file (memfd), which vanishes when the ranks end. The size of a pod's /dev/shm, which is often
small, does not limit these files.
"""

import mmap
import os
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dltrain.comm.core.collective import host_array
from dltrain.comm.core.fault_tolerance import translate

Bytes = NDArray[np.uint8]


class Memory:
    """An allocator for gradients. If possible, it allocates memory that all ranks of ``comm`` share."""

    def __init__(self, comm: Any) -> None:
        """Prepare to allocate. ``comm``: the communicator of the ranks that share memory; None for private memory."""
        self.region: Region | None = None
        self._comm = comm

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return ``count`` zeros in memory that all ranks share, if that is possible.

        All ranks must call this method together, once per ``Memory``. Raise PeerLostError if a rank ends meanwhile.
        """
        if self._comm is not None and device.type == "cpu":
            self.region = Region.make(self._comm, count * dtype.itemsize)
        if self.region is not None:
            return self.region.empty(count, dtype)
        return torch.zeros(count, dtype=dtype, device=device)


class Region:
    """Memory that all ranks of one machine share. Each rank owns one part and can access all parts.

    ``parts``: the bytes of each rank's part, in rank order and of equal length. ``rank``: this rank's number.
    """

    def __init__(self, parts: list[Bytes], rank: int) -> None:
        self.parts, self._own = parts, parts[rank]

    @classmethod
    def make(cls, comm: Any, nbytes: int) -> "Region | None":
        """Allocate ``nbytes`` for each rank of ``comm`` in shared memory. All ranks must call this method together.

        Return None on all ranks if they are on different machines, or if memory cannot be shared. Raise PeerLostError
        if a rank is lost during the call.
        """
        from mpi4py import MPI

        try:
            near = comm.Split_type(MPI.COMM_TYPE_SHARED)
            alone = near.Get_size() < comm.Get_size()
            near.Free()
            if comm.allreduce(alone, MPI.LOR):
                return None
            file = _file(nbytes)
            files: list[tuple[int, int]] = comm.allgather((os.getpid(), file))
            parts = _map(files, nbytes)
            seen = comm.allreduce(
                parts is not None, MPI.LAND
            )  # also a barrier: no rank closes its file before all have opened it
        except MPI.Exception as error:
            raise translate(error) from error
        if file >= 0:
            os.close(file)
        return cls(parts, comm.Get_rank()) if seen and parts is not None else None

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first ``count`` elements of this rank's part, which are zero initially."""
        return torch.from_numpy(self._own).view(dtype)[:count]

    def everywhere(self, buffer: torch.Tensor) -> list[NDArray[Any]] | None:
        """Return one array per rank: the part of the rank's memory that corresponds to ``buffer`` here.

        An array begins at the same offset in the rank's part as ``buffer`` in this rank's part. The arrays share the
        region's memory, and have the shape and dtype of ``buffer``. Return None if ``buffer`` is not in this rank's
        part.
        """
        start = buffer.data_ptr() - self._own.ctypes.data
        if not 0 <= start <= start + buffer.nbytes <= self._own.nbytes:
            return None
        dtype = host_array(buffer).dtype
        return [part[start : start + buffer.nbytes].view(dtype) for part in self.parts]


def _file(nbytes: int) -> int:
    """Return the descriptor of a new anonymous file of ``nbytes`` bytes, or -1 on failure.

    The file's memory is allocated now, because the kernel would kill the process if memory ran out during a later
    write.
    """
    try:
        file = os.memfd_create("dltrain-gradients")
    except OSError:
        return -1
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.close(file)
        return -1
    return file


def _map(files: list[tuple[int, int]], nbytes: int) -> list[Bytes] | None:
    """Map the files of all ranks into memory. Return the bytes of each file, by rank, or None on failure.

    ``files``: (process id, descriptor) of each rank's file. ``nbytes``: size of a file. A file cannot be opened if, for
    example, its rank is in another PID namespace or belongs to another user.
    """
    parts = []
    for process, file in files:
        with suppress(OSError, ValueError):
            opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
            try:
                parts.append(np.frombuffer(mmap.mmap(opened, nbytes), np.uint8))
            finally:
                os.close(opened)
    return parts if len(parts) == len(files) else None
