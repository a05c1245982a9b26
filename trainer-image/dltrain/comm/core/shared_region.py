"""Memory that all ranks of one machine see, a part for each.

Anonymous files (memfd), so nothing is left behind however ranks end, and a pod's small /dev/shm does not bound it.
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
    """Where gradients live: in a region that all ranks of ``comm`` see if there is one, else anywhere."""

    def __init__(self, comm: Any) -> None:
        """``comm``: None where nothing is to be shared."""
        self.region: Region | None = None
        self._comm = comm

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Once only, on all ranks together. Raises PeerLostError."""
        if self._comm is not None and device.type == "cpu":
            self.region = Region.make(self._comm, count * dtype.itemsize)
        if self.region is not None:
            return self.region.empty(count, dtype)
        return torch.zeros(count, dtype=dtype, device=device)


class Region:
    """``parts``: every rank's bytes, by rank, equally many; ``parts[comm.rank]`` is this rank's own."""

    def __init__(self, parts: list[Bytes], rank: int) -> None:
        self.parts, self._own = parts, parts[rank]

    @classmethod
    def make(cls, comm: Any, nbytes: int) -> "Region | None":
        """``nbytes`` for each rank of ``comm``; None, on all of them, where they do not share a machine.

        All ranks call it together. Raises PeerLostError.
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
            seen = comm.allreduce(parts is not None, MPI.LAND)  # also: nobody closes before all have opened
        except MPI.Exception as error:
            raise translate(error) from error
        if file >= 0:
            os.close(file)
        return cls(parts, comm.Get_rank()) if seen and parts is not None else None

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` elements at the start of this rank's part; zero at first."""
        return torch.from_numpy(self._own).view(dtype)[:count]

    def everywhere(self, buffer: torch.Tensor) -> list[NDArray[Any]] | None:
        """The ranks' views of what ``buffer`` is here, if it lies in this rank's part: at the same place in theirs."""
        start = buffer.data_ptr() - self._own.ctypes.data
        if not 0 <= start <= start + buffer.nbytes <= self._own.nbytes:
            return None
        dtype = host_array(buffer).dtype
        return [part[start : start + buffer.nbytes].view(dtype) for part in self.parts]


def _file(nbytes: int) -> int:
    """A new anonymous file of so many bytes, all there (else touching it could kill the process); -1: it cannot be."""
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
    """The ranks' files (process, descriptor); None when one cannot be opened: other PID namespace, other user."""
    parts = []
    for process, file in files:
        with suppress(OSError, ValueError):
            opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
            try:
                parts.append(np.frombuffer(mmap.mmap(opened, nbytes), np.uint8))
            finally:
                os.close(opened)
    return parts if len(parts) == len(files) else None
