"""All-reduce with 16 bits per number on the network and error feedback.

Each rank sums one part of a buffer for all ranks, in the buffer's precision. The rank receives this part from every
other rank, rounded to 16 bits, and sends the total back, rounded again. The traffic is half of that of a ring
all-reduce of float32 numbers. Numbers are rounded twice, whatever the number of ranks. A rank stores the rounding
errors of what it sends (the residuals) and adds them to its numbers of the next step before rounding (Karimireddy et
al. 2019; for both directions: Tang et al. 2019). Averaged over steps, the received values therefore equal the sent
values. Every rank ends with the same bits. If the scale of the numbers changes, as with a loss scale, the residuals
must be rescaled or cleared (``rescale_residuals``).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dltrain.comm.core.collective import AllOf, Work
from dltrain.comm.core.fault_tolerance import duplicate, translate
from dltrain.comm.core.polling import Polled, Run
from dltrain.comm.core.waiting import complete
from dltrain.comm.schedules.butterfly import Butterfly
from dltrain.comm.schedules.schedule import chunks

KINDS = {"BF16": torch.bfloat16, "FP16": torch.float16}


class Compressed(Polled):
    name = "Compressed"

    def __init__(self, comm: Any, buffers: list[torch.Tensor], kind: str, tail: int = 0) -> None:
        """Create the all-reduce of ``buffers`` over the ranks of ``comm``. ``kind``: 16-bit format, one of ``KINDS``.

        ``tail``: number of elements at the end of the last buffer that are sent uncompressed, such as losses and times.

        Raises ValueError unless the buffers are float32 or float64 on a CPU.
        """
        super().__init__(comm, buffers)
        if buffers[0].dtype not in (torch.float32, torch.float64) or buffers[0].is_cuda:
            found = f"{buffers[0].dtype} on {buffers[0].device}"
            raise ValueError(f"gradients: found {found}; expected float32 or float64 on a CPU to compress to {kind}")
        *first, last = buffers
        cut = last.numel() - tail
        runs = [_Run(comm, tag, buffer, KINDS[kind]) for tag, buffer in enumerate([*first, last[:cut]])]
        self._tail = Butterfly(duplicate(comm), [last[cut:]], last.nbytes) if tail else None
        self._rounded = runs
        self.use_runs([*runs, *(self._tail.runs if self._tail is not None else ())])

    def start(self, index: int) -> Work:
        work = super().start(index)
        if self._tail is None or index < len(self.buffers) - 1:
            return work
        return AllOf([work, self._tail.start(0)])

    def rescale_residuals(self, factor: float) -> None:
        for run in self._rounded:
            run.rescale_residuals(factor)

    def abandon(self) -> None:
        super().abandon()
        if self._tail is not None:
            self._tail.abandon()

    def close(self) -> None:
        super().close()  # also frees the run of the tail
        self._tail = None


class _Run(Run):
    """The all-reduce of one buffer. Each rank sums one part of the buffer for all ranks.

    In phase 0, this rank waits until every other rank has sent its numbers of this rank's part. In phase 1, it waits
    for the totals of the other parts. Phase 2 means that the all-reduce is done.
    """

    def __init__(self, comm: Any, tag: int, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        from mpi4py import MPI  # a local import, because importing it may start MPI

        self._mpi_error = MPI.Exception
        self._startall = MPI.Prequest.Startall
        rank, size = comm.Get_rank(), comm.Get_size()
        bounds = chunks(buffer.numel(), size)
        start, stop = bounds[rank]
        self._buffer, self._mine = buffer, slice(start, stop)
        self._wire = torch.zeros(buffer.numel(), dtype=dtype, device="cpu")
        """Rounded numbers: first this rank's numbers, for the parts that other ranks sum, and later the totals of all
        parts."""
        self._residual = torch.zeros_like(buffer)
        """Rounding errors of what this rank sends: its numbers for the parts that other ranks sum, and its own part's
        total."""
        self._received = torch.zeros((size, stop - start), dtype=dtype, device="cpu")
        self._others = [(rank + i) % size for i in range(1, size)]
        wire, received = _numbers(self._wire), _numbers(self._received)
        parts = {peer: wire[slice(*bounds[peer])] for peer in range(size)}
        self._up = [comm.Recv_init(received[peer], source=peer, tag=2 * tag) for peer in self._others]
        self._up += [comm.Send_init(parts[peer], dest=peer, tag=2 * tag) for peer in self._others]
        self._down = [comm.Recv_init(parts[peer], source=peer, tag=2 * tag + 1) for peer in self._others]
        self._down += [comm.Send_init(parts[rank], dest=peer, tag=2 * tag + 1) for peer in self._others]
        self._rank, self._size = rank, size
        self._phase = 2

    def start(self) -> None:
        assert self.finished, "the previous reduction is done"
        mine = self._mine
        own_residual = self._residual[mine].clone()  # added to the total later, not to this rank's numbers
        self._residual[mine] = 0
        self._buffer.add_(self._residual)
        self._wire.copy_(self._buffer)
        torch.sub(self._buffer, self._wire, out=self._residual)
        self._residual[mine] = own_residual
        self._phase = 0
        self._begin(self._up)
        self.test()

    def rescale_residuals(self, factor: float) -> None:
        """Multiply the residuals (rounding errors of the last reduction) by ``factor``; 0 clears them.

        Call this method only between reductions.
        """
        if factor:
            self._residual.mul_(factor)
        else:
            self._residual.zero_()  # 0 times a number that is not finite would not be 0

    @property
    def finished(self) -> bool:
        return self._phase == 2

    @property
    def progress(self) -> int:
        return self._phase

    def test(self) -> bool:
        """Make progress without blocking. Return True if the sum is in the buffer.

        Raise PeerLostError if a rank is lost.
        """
        if self._phase == 0 and self._arrived(self._up):
            self._total()
            self._phase = 1
            self._begin(self._down)
        if self._phase == 1 and self._arrived(self._down):
            self._buffer.copy_(self._wire)
            self._phase = 2
        return self._phase == 2

    def _total(self) -> None:
        """Sum this rank's part of the buffer over all ranks, add its residual, and round the total to 16 bits.

        The residual is the rounding error of this part's last total.
        """
        mine, total = self._mine, self._buffer[self._mine]
        for peer in self._others:
            total.add_(self._received[peer])
        total.add_(self._residual[mine])
        self._wire[mine] = total
        torch.sub(total, self._wire[mine], out=self._residual[mine])

    def _begin(self, requests: list[Any]) -> None:
        try:
            self._startall(requests)
        except self._mpi_error as error:
            raise translate(error) from error

    def _arrived(self, requests: list[Any]) -> bool:
        try:
            return complete(requests)
        except self._mpi_error as error:
            raise translate(error) from error

    def close(self) -> None:
        if self.finished:
            for request in (*self._up, *self._down):
                request.Free()
        self._up, self._down = [], []


def _numbers(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the bits of 16-bit numbers as a uint16 array that shares the tensor's memory. numpy has no bfloat16."""
    return tensor.view(torch.int16).numpy().view(np.uint16)
