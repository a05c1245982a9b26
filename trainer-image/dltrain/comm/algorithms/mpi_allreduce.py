"""MPI's own all-reduce. The library chooses the algorithm. Calls are non-blocking and reduce at most 32 MiB each."""

from typing import Any

import torch

from dltrain.comm.core.collective import Collective, host_array
from dltrain.comm.core.fault_tolerance import translate
from dltrain.comm.core.waiting import complete, wait_until
from dltrain.comm.schedules.schedule import pieces

LONGEST_NBYTES = 32 * 2**20
"""Maximum number of bytes that one call reduces. The measured bandwidth of Open MPI 5 falls from 10 to 2.7 GB/s between
16 and 64 MiB."""


class MpiAllreduce(Collective):
    name = "MPI"

    def __init__(self, comm: Any, buffers: list[torch.Tensor]) -> None:
        super().__init__(comm, buffers)
        self._parts = [
            [host_array(buffer)[a:b] for a, b in pieces(0, buffer.numel(), LONGEST_NBYTES // buffer.itemsize)]
            for buffer in buffers
        ]

    def start(self, index: int) -> "_Pending":
        return _Pending(self.comm, self._parts[index])

    def close(self) -> None:
        return None


class _Pending:
    def __init__(self, comm: Any, parts: list[Any]) -> None:
        from mpi4py import MPI

        self._mpi, self._error = MPI, MPI.Exception
        try:
            self._requests = [comm.Iallreduce(MPI.IN_PLACE, part) for part in parts]
        except MPI.Exception as error:
            raise translate(error) from error

    def test(self) -> bool:
        try:
            return complete(self._requests)
        except self._error as error:
            raise translate(error) from error

    def wait(self) -> None:
        wait_until(self.test)
