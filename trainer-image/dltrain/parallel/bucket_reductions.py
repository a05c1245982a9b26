"""Weight the gradients of each bucket by the rank's fraction of the batch, and start the buckets' reductions in order.

The reduction of a bucket starts as soon as its gradients are complete. ``batch/sampling.py`` computes the fraction.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from dltrain.comm.core.collective import AllOf, Collective, Work
from dltrain.parallel.gradient_buffer import GradientBuffer

_DRIVE_S, _DRIVEN = 0.5e-3, 3
"""Minimum seconds between two checks of running reductions, and maximum number of running reductions per check."""


class BucketReductions:
    """The reductions of the buckets of gradients in the current step. They start in the same order on every rank."""

    def __init__(self, buffer: GradientBuffer, collective: Collective, *, marked: bool) -> None:
        """Prepare the reductions of the buckets of ``buffer``.

        ``marked``: True if the last bucket has marks for the parameters that this rank's backward passes reached.
        """
        self._buffer, self._collective, self._marked = buffer, collective, marked
        self._bucket_of = {p: i for i, bucket in enumerate(buffer.buckets) for p in bucket.parameters}
        self._missing: list[int] = []
        self._works: list[Work] = []
        self._under_way: deque[Work] = deque()
        self._driven = 0.0
        self._own_square: Tensor | float = 0.0
        self._earlier_weight = 0.0
        """Sum of the weights of the step's micro-batches before the current one."""
        self._square_at: int | None = None
        self.waiting: set[int] = set()
        """Indices of the parameters whose gradients are missing. The reductions of their buckets wait for them."""
        self.reached: set[int] = set()
        """Indices of the parameters that this rank's backward passes have reached."""
        self.weight = 1.0
        """Factor by which this rank's gradients are multiplied before their reduction.

        With micro-batches, this is the factor of the current micro-batch, and ``adopt`` multiplies by it."""
        self.accumulates = False
        """True if the step has several micro-batches, whose weighted gradients the buffer adds up."""
        self.began = 0.0
        """Time of the start of the step's first reduction: the value of ``time.perf_counter`` in seconds."""

    def begin(self, weight: float, square_at: int | None, *, accumulates: bool = False) -> None:
        """Begin a step. ``weight``: factor by which this rank's gradients are multiplied before their reduction.

        ``square_at``: index in the tail (the last values of the buffer) at which this rank shares its weight times the
        squared norm of its local gradient; None: do not share it. ``accumulates``: True if the step has several
        micro-batches. Call ``begin_micro_batch`` before each of them.
        """
        self.accumulates, self._earlier_weight = accumulates, 0.0
        self._missing = [len(bucket.parameters) for bucket in self._buffer.buckets]
        self.waiting = set(range(len(self._buffer.parameters)))
        self.reached.clear()
        self._works = []
        self._under_way.clear()
        self.weight, self._own_square, self._square_at = 0.0 if accumulates else weight, 0.0, square_at

    def begin_micro_batch(self, weight: float) -> None:
        """Begin a micro-batch. ``weight``: factor by which its gradients are multiplied before they are added."""
        self._earlier_weight += self.weight
        self.weight = weight

    def adopt(self, index: int) -> None:
        """Take a gradient that a backward pass or the script has assigned to ``p.grad`` into the buffer.

        ``index``: index of the parameter.
        """
        if self._buffer.add(index, self.weight) if self.accumulates else self._buffer.adopt(index):
            self.reached.add(index)

    def started(self, index: int) -> bool:
        """Return True if the reduction of the bucket of parameter ``index`` has started in this step."""
        return self._bucket_of[index] < len(self._works)

    @property
    def any_started(self) -> bool:
        return bool(self._works)

    @property
    def all_started(self) -> bool:
        return len(self._works) == len(self._buffer.buckets)

    def came(self, index: int) -> bool:
        """Record that the gradient of parameter ``index`` is complete, or that no reduction must wait for it.

        Return False if no reduction was waiting for this gradient, as at a second call in a step.
        """
        if index not in self.waiting:
            return False
        self.waiting.discard(index)
        self._missing[self._bucket_of[index]] -= 1
        return True

    def skip(self, indices: Iterable[int]) -> None:
        """Wait no longer for the gradients of the parameters ``indices``.

        The values in the buffer, usually 0, are reduced.
        """
        for index in indices:
            self.adopt(index)
            self.came(index)

    def start_complete(self) -> None:
        """Start the reductions of the next buckets in order, up to the first that lacks a gradient.

        Raise PeerLostError if a rank is lost.
        """
        while len(self._works) < len(self._missing) and not self._missing[len(self._works)]:
            self._start(len(self._works))

    def start_rest(self) -> None:
        """Start the reductions of all remaining buckets, even if gradients are missing.

        Raise PeerLostError if a rank is lost.
        """
        if not self.reached:  # no backward pass, but the script may have written gradients into the buffer
            self.reached.update(index for index, view in enumerate(self._buffer.views) if bool(view.any()))
        for bucket in range(len(self._works), len(self._buffer.buckets)):
            for index in self._buffer.buckets[bucket].parameters:
                self.adopt(index)
            self._start(bucket)

    def wait(self) -> None:
        """Wait for all reductions that have started. Raise PeerLostError if a rank is lost."""
        for work in self._works:
            work.wait()

    def drive(self) -> None:
        """Let MPI make progress on the oldest running reductions, at most once in ``_DRIVE_S`` seconds.

        The oldest few are enough to use the whole bandwidth. Calls are rare, because testing an unfinished reduction
        yields the CPU, which would slow down the backward pass.
        """
        now = time.perf_counter()
        if now - self._driven < _DRIVE_S:
            return
        self._driven = now
        while self._under_way and self._under_way[0].test():
            self._under_way.popleft()
        for work in islice(self._under_way, 1, _DRIVEN):
            work.test()

    def add_late(self, ranks: Sequence[float], take: Callable[[int], Tensor | None], divisor: float) -> None:
        """Reduce late gradients, whose buckets were reduced without them. All ranks must call this together.

        ``ranks``: for each parameter, the number of ranks with a late gradient. ``take``: returns this rank's late
        gradient of the parameter with a given index, or None if it has none. ``divisor``: the number by which the sum
        over ranks is divided; 0: do not divide. Raise PeerLostError if a rank is lost.
        """
        for bucket in sorted({self._bucket_of[index] for index, count in enumerate(ranks) if count}):
            part = self._buffer.slices[bucket]
            reduced = part.clone()
            part.zero_()
            for index in self._buffer.buckets[bucket].parameters:
                if (gradient := take(index)) is not None and self.weight:
                    self._buffer.views[index].copy_(gradient).mul_(self.weight)
            self._collective.start(bucket).wait()
            if divisor:
                part.div_(divisor)
            part.add_(reduced)

    def _start(self, bucket: int) -> None:
        if not self._works:
            self.began = time.perf_counter()
        buffer, last = self._buffer, bucket == len(self._buffer.buckets) - 1
        gradient = buffer.flat[buffer.buckets[bucket].start : buffer.buckets[bucket].stop]
        weight = self._earlier_weight + self.weight
        if self._square_at is not None and weight:
            norm = torch.linalg.vector_norm(gradient)  # read it only on a CPU: on a GPU the read would block
            factor = 1 / weight if self.accumulates else weight  # accumulated gradients have their weights already
            self._own_square += factor * (float(norm) if gradient.device.type == "cpu" else norm) ** 2
            if last:
                buffer.tail[self._square_at] = self._own_square
        if self.accumulates:
            pass
        elif not self.weight:
            gradient.zero_()  # the mean over no samples is NaN, and 0 * NaN is NaN
        elif self.weight != 1.0:
            gradient.mul_(self.weight)
        if last and self._marked:  # ``reached`` is complete now
            buffer.mark(self.reached)
        work = self._collective.start(bucket)
        if buffer.wide_tail and last:
            work = AllOf([work, self._collective.start(bucket + 1)])
        self._works.append(work)
        self._under_way.append(work)
