"""DDP's reducer with a communication hook that weights the gradients of ranks with different local batch sizes.

The reducer (C++) copies each gradient into a bucket when autograd has computed it, and calls the hook for each full
bucket, in the same order on all ranks. The hook multiplies the bucket by this rank's weight and starts an all-reduce
that sums. The numbers that ranks share at every step follow the last bucket in an all-reduce of their own.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dlcontract import DDP_BUCKET_NBYTES
from dltrain.comm.algorithms.torch_distributed import TorchDistributed, interpret, raise_lost
from dltrain.comm.core.fault_tolerance import duplicate
from dltrain.comm.process_group import ProcessGroup
from dltrain.parallel.gradient_buffer import fill


class WeightedReducer:
    """Reduce the gradients of some parameters, and the numbers that ranks share, once in each step."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        process_group: ProcessGroup,
        host: str,
        bucket_nbytes: int,
        tail: int,
    ) -> None:
        """Join torch's process group and attach DDP's reducer to ``parameters``, which are on one device.

        ``host``: the address of rank 0. ``bucket_nbytes``: maximum size of a bucket; with DDP's own size, the first
        bucket is smaller, as in DDP. ``tail``: number of values that ranks share at every step. All ranks must call
        this together. Raise PeerLostError if a rank is lost.
        """
        count, wide = len(parameters), any(parameter.dtype == torch.float64 for parameter in parameters)
        dtype = torch.float64 if wide else torch.float32
        self.shared = torch.zeros(count + tail, dtype=dtype, device=parameters[0].device)
        """A mark for each parameter, which is 1 if a backward pass of this rank has reached it; then the tail."""
        self.marks, self.tail = self.shared[:count], self.shared[count:]
        self.collective = TorchDistributed(duplicate(process_group.comm), [self.shared], host)
        self._ddp: Any = DistributedDataParallel(
            _module_of(parameters),
            init_sync=False,  # ``t.wrap`` has made parameters and buffers equal
            bucket_cap_mb=None if bucket_nbytes == DDP_BUCKET_NBYTES else bucket_nbytes / 2**20,
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(None, self._reduce)
        self.weight = 1.0
        """Factor by which this rank's gradients are multiplied before their reduction.

        With micro-batches, it is the factor of the current one, and gradients are multiplied when they are added."""
        self.earlier_weight = 0.0
        """Sum of the weights of the step's micro-batches before the current one."""
        self.weighted = False
        """True if the gradients contain their weights already, because the step has several micro-batches."""
        self.square_at: int | None = None
        """Index in the tail at which this rank shares its weight times the squared norm of its local gradient."""
        self.reached: set[int] = set()
        """Indices of the parameters that this rank's backward passes have reached."""
        self.began = 0.0
        """Time of the start of the step's first reduction: the value of ``time.perf_counter`` in seconds."""
        self.lost: RuntimeError | None = None
        """The error that ended a reduction. No further reduction starts."""
        self._own_square: Tensor | float = 0.0
        self._tail_work: Any = None

    @property
    def sent(self) -> bool:
        """Return True if the reduction of the tail has started in this step."""
        return self._tail_work is not None

    def begin(self, shared: list[float], *, weighted: bool) -> None:
        """Begin a step. ``shared``: this rank's values for the tail. ``weighted``: see the attribute."""
        fill(self.tail, shared)
        self.weighted, self.earlier_weight = weighted, 0.0
        self._own_square, self._tail_work = 0.0, None
        self.reached.clear()

    def prepare(self) -> None:
        """Prepare for the gradients of a backward pass. Without this call, the reducer ignores gradients."""
        self._ddp.reducer.prepare_for_backward([])

    def skip(self, indices: Iterable[int]) -> None:
        """Wait no longer for the gradients of the parameters ``indices``. What ``p.grad`` has, or 0, is reduced.

        Call this method within a backward pass.
        """
        for index in sorted(indices, reverse=True):
            self._ddp.reducer._autograd_hook(index)

    def rearrange(self) -> None:
        """Divide the gradients into buckets of the maximum size, in the order of the first reduction.

        All ranks must call this method together, after the first reduction. Raise PeerLostError if a rank is lost.
        """
        try:
            self._ddp.reducer._rebuild_buckets()
        except RuntimeError as error:
            raise_lost(error)

    def wait(self) -> None:
        """Wait for the reduction of the tail, which is the last one. On a GPU, only its stream waits."""
        try:
            if self.lost is None:
                self._tail_work.wait()
        except RuntimeError as error:
            self.lost = error

    def close(self) -> None:
        """Detach the reducer and leave torch's process group, if this object has created it."""
        self._ddp = None
        self.collective.close()

    def _reduce(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """Weight the gradients of a bucket and start its all-reduce: DDP's communication hook."""
        part, total = bucket.buffer(), self.earlier_weight + self.weight
        if not bucket.index():
            self.began = time.perf_counter()
        if not self.weighted and not self.weight:
            part.zero_()  # the mean over no samples is NaN, and 0 * NaN is NaN
        elif not self.weighted and self.weight != 1.0:
            part.mul_(self.weight)
        if self.square_at is not None and total:
            self._own_square = self._own_square + torch.linalg.vector_norm(part).to(self.shared.dtype) ** 2 / total
        try:
            if self.lost is not None:
                raise self.lost
            future = self.collective.begun(torch.distributed.all_reduce, part).future()
            if bucket.is_last():
                self._send_tail()
        except RuntimeError as error:
            self.lost = error  # the backward pass goes on, and ``finish`` raises the error
            future = Future[list[Tensor]](devices=[part.device] if part.is_cuda else None)
            future.set_result([part])

        def reduced(done: Future[list[Tensor]]) -> Tensor:
            try:
                return done.value()[0]
            except RuntimeError as error:
                self.lost = self.lost or interpret(error)
                return part

        return future.then(reduced)

    def _send_tail(self) -> None:
        if len(self.reached) == len(self.marks):
            self.marks.fill_(1)
        else:
            fill(self.marks, [float(index in self.reached) for index in range(len(self.marks))])
        if self.square_at is not None:
            self.tail[self.square_at] = self._own_square
        self._tail_work = self.collective.start(0)


def _module_of(parameters: Sequence[nn.Parameter]) -> nn.Module:
    """Return a module with these parameters, in this order. DDP then expects no sparse gradients."""
    module = nn.Module()
    for index, parameter in enumerate(parameters):
        module.register_parameter(str(index), parameter)
    return module
