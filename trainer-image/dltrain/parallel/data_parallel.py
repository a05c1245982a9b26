"""Data parallel training: gradients of all ranks are summed while backward is still running.

Rank r computes the mean loss of its b_r samples; its gradient times b_r / B, summed over ranks, is the gradient of the
mean over the B samples of the batch, as one process would have it, whatever the split. The same holds for a mean over
tokens, with tokens in the place of samples; their total is known only after the sum, and divides it then.

Once backward has reached every parameter it ends with the wait for the sums, so that a script finds the whole batch's
gradients in ``p.grad`` and may clip or look at them, as in one process. What it leaves without a part (a head that this
step does not use) may still come by another backward pass: then the optimizer's step waits, as ``whole`` does.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch.autograd import Variable

from dltrain.comm.core.collective import Collective, Work
from dltrain.device.rank_device import finish
from dltrain.parallel.gradient_buffer import GradientBuffer
from dltrain.parallel.placement import Placement
from dltrain.protocol.errors import MisuseError, PeerLostError
from dltrain.timing.backward_passes import Passes
from dltrain.timing.stopwatch import Lap, reading

_DRIVE_S, _DRIVEN = 0.5e-3, 3
"""During backward, sums are driven so often at most, and so many of them."""


def square_of(tensors: Iterable[torch.Tensor]) -> float:
    """Squared norm of all of them together, read at once: each reading waits for a GPU."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return sum(norm**2 for norm in torch.stack(norms).tolist()) if norms else 0.0


class DataParallel(Placement):
    """Sums gradients over ranks, bucket by bucket, started by hooks as backward completes them.

    Buckets start in the same order on every rank, whatever order backward finishes them in; every hook also drives
    the messages under way, because MPI moves them only inside calls.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        collective: Callable[[list[torch.Tensor]], Collective],
        bucket_nbytes: int,
        tail: int,
        zeros: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None = None,
    ) -> None:
        """``collective`` makes the strategy for the buckets; ``tail``: numbers shared at every step; ``zeros``: where
        the memory of the buckets comes from, default torch.
        """
        parameters = list(parameters)
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self.buffer = GradientBuffer(parameters, bucket_nbytes, tail, zeros, marked=not self.in_parts)
        self.collective = collective(self.buffer.slices)
        self.exposed_s = 0.0
        """Time of the last step spent waiting for the sum, not hidden behind backward."""
        self.waited = Lap()
        """Of the step under way, time within the script's part of it that was spent on other ranks."""
        self.passes = Passes(self.buffer.flat.device)
        """Backward passes of the step under way."""
        self.sum_s = 0.0
        """Of the last step, from the start of the first sum to the end of the last."""
        self._sums_began = 0.0
        self.square = 0.0
        """Squared norm of this rank's part of the last gradient, where it holds but a part of it."""
        self.square_at: int | None = None
        """Position in the tail where this rank's weight times the square of its gradient goes; None: nowhere."""
        self.measured_norm = 0.0
        """Of the whole batch's gradient, before the script touches it; in steps with ``square_at`` only."""
        self.weight_at: int | None = None
        """Position in the tail of the total of what ranks weigh their loss by, which divides the sum; None: nowhere."""
        self._own_square: torch.Tensor | float = 0.0
        self._summed: list[float] = []
        """Sums of marks and tail."""
        self._bucket_of = {p: i for i, bucket in enumerate(self.buffer.buckets) for p in bucket.parameters}
        self._missing: list[int] = []
        self._works: list[Work] = []
        self._under_way: deque[Work] = deque()
        self._driven = 0.0
        self._weight = 1.0
        self._open = False
        self._reached: set[int] = set()
        self._accumulates = self._queued = self._whole = False
        self._norm: float | None = None
        self._finished = False
        """Whether ``finish`` was reached since ``begin``."""
        self._left = 1.0
        self._version: int | None = None
        self._lost: PeerLostError | None = None
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.buffer.parameters)
        ]

    def begin(self, weight: float, shared: list[float]) -> None:
        """Zero the gradients and open a step; ``weight``: b_r / B. ``shared``: this rank's part of the tail.

        Raises MisuseError when the script made parameters trainable that were frozen.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            thawed = [tuple(p.shape) for p in self._frozen if p.requires_grad]
            raise MisuseError(
                f"model: found parameters {thawed} trainable that were frozen in t.wrap, whose gradients no rank sums: "
                "wrap the model with all that will ever be trained trainable, and freeze after t.wrap"
            )
        self.buffer.attach()
        self.buffer.tell(shared)
        self._missing = [len(bucket.parameters) for bucket in self.buffer.buckets]
        self._works = []
        self._under_way.clear()
        self._weight = weight
        self._own_square, self.exposed_s, self.waited = 0.0, 0.0, Lap()
        self.passes.begin()
        self._reached.clear()
        self._queued = self._whole = False
        self._norm = self._version = None
        self._open, self._finished, self._left = True, False, 1.0

    def share(self, position: int, values: Sequence[torch.Tensor | float]) -> bool:
        """Put ``values`` into the tail from ``position`` on; False when it is too late for this step.

        Tensors are not read: on a GPU that would wait for the forward pass.
        """
        if not self._open or len(self._works) == len(self.buffer.buckets):
            return False
        for offset, value in enumerate(values):
            self.buffer.tail[position + offset] = value
        self._seen()
        return True

    def weigh(self, weight: float) -> None:
        """Another weight than ``begin``'s for this step, before its backward pass. Raises MisuseError later on."""
        if not self._open or self._works or self._reached:
            raise MisuseError(
                "t.weigh: found a weight in the middle of backward, expected it between the batch and backward()"
            )
        self._weight = weight

    def unscaled(self, scale: float, left: float) -> None:
        """After ``finish``: losses were multiplied by ``scale``, of which gradients still bear ``left``."""
        self.measured_norm /= scale
        self._left = left
        self._seen()

    def carry(self, factor: float) -> None:
        """See ``Collective``."""
        self.collective.carry(factor)

    def gradient_norm(self) -> float:
        """Euclidean norm of the gradient that this rank holds; of before ``clip``."""
        norm = float(torch.linalg.vector_norm(self.buffer.gradient)) if self._norm is None else self._norm
        return norm / self._left

    def clip(self, most: float) -> float:
        """Scale the whole batch's gradient so that its norm is at most ``most``; returns the norm it had.

        A lost rank shows in ``finish``; what is returned then is of no use, as in a step that was given up.
        """
        if not (self._open or self._finished) or self._lost is not None:
            return 0.0
        self._catch_up()
        began = reading()
        try:
            self.whole()
            self.waited += reading() - began
            self._norm = self._norm_of_all()
        except PeerLostError as error:
            self._lost = error
            self.abandon()
            return 0.0
        if self._norm > most:
            self.buffer.gradient.mul_(most / (self._norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self._seen()
        return self._norm

    def _norm_of_all(self) -> float:
        return self.gradient_norm()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes within add up; the one after them is the step's last."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def finish(self) -> list[float]:
        """Wait for the sum of all gradients; returns the summed tail. Raises PeerLostError.

        Parameters that no rank's backward reached have no gradient afterwards: optimizers pass over them, as in one
        process. Raises MisuseError when the script changed gradients before they were summed.
        """
        assert self._open, "begin comes before finish"
        self._open = False
        if self._lost is not None:
            raise self._lost
        self.whole()
        for parameter, mark in zip(self.buffer.parameters, self._summed[: len(self.buffer.marks)], strict=False):
            if not mark:
                parameter.grad = None
        self._finished = True
        return self._summed[len(self.buffer.marks) :]

    def whole(self) -> None:
        """Wait until the gradients are those of the whole batch. Raises PeerLostError, MisuseError as ``finish``."""
        if self._version not in (None, self.buffer.flat._version) and (self.in_parts or not self._whole):
            raise MisuseError(
                "found gradients changed between backward() and opt.step() while their sum over ranks was under way: "
                + ("each rank holds a part of it (parallelism.strategy Optimizer)" if self.in_parts else self._rest)
                + ". Clip by t.clip_gradients(max_norm), which knows"
            )
        if self._whole:
            return
        self._catch_up()
        began = time.perf_counter()
        if not self._reached:  # no backward pass, but perhaps gradients that the script wrote there itself
            self._reached.update(index for index, view in enumerate(self.buffer.views) if bool(view.any()))
        for bucket in range(len(self._works), len(self.buffer.buckets)):
            for parameter in self.buffer.buckets[bucket].parameters:
                if self.buffer.adopt(parameter):
                    self._reached.add(parameter)  # or put in its place
            self._start(bucket)
        self._wait_for_sums()
        self.exposed_s += time.perf_counter() - began

    @property
    def _rest(self) -> str:
        return f"{len(self.buffer.parameters) - len(self._reached)} parameters had no part in the loss"

    def _wait_for_sums(self) -> None:
        for work in self._works:
            work.wait()
        self._catch_up()
        self.sum_s = time.perf_counter() - self._sums_began
        self._summed = self.buffer.exchanged.tolist()  # one copy from a GPU
        if self.weight_at is not None and (weight := self._summed[len(self.buffer.marks) + self.weight_at]):
            self.buffer.gradient.div_(weight)
        self._whole = True
        if self.square_at is not None:
            self.measured_norm = self._norm_of_all()
        self._seen()

    def _catch_up(self) -> None:
        """Wait until a GPU has done what it was given: else it would count as time spent on other ranks. Whatever comes
        next needs the sum, so that there is nothing to give the GPU meanwhile.
        """
        finish(self.buffer.flat.device)

    def _backward_ended(self) -> None:
        """The engine's last act in a backward pass; one within another (a reentrant checkpoint) has an end, too."""
        self._queued = False
        self.passes.end()
        if self._lost is not None or self._whole or self.in_parts or len(self._works) < len(self.buffer.buckets):
            return
        self._catch_up()
        began = reading()
        try:
            self._wait_for_sums()
        except PeerLostError as error:  # ``finish`` tells
            self._lost = error
            self.abandon()
        took = reading() - began
        self.waited += took
        self.exposed_s += took.wall_s

    def _seen(self) -> None:
        """What the gradients' memory is now is our doing: torch counts its changes."""
        if self._version is not None or self._reached:
            self._version = self.buffer.flat._version

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        bucket = self._bucket_of[index]

        def ready(parameter: torch.Tensor) -> None:
            if not self._open or self._lost is not None:
                return
            if not self._queued:
                Variable._execution_engine.queue_callback(self._backward_ended)
                self._queued = True
                self.passes.start()
            self.buffer.adopt(index)
            self._reached.add(index)
            if self._accumulates:
                self._seen()
                return
            self._missing[bucket] -= 1
            if self._missing[bucket] < 0:
                raise MisuseError(
                    "found a second backward pass in one step, expected one: call opt.step() after each backward(), or "
                    "add the losses up and call backward() once, or pass `with t.no_sync():` around all but the last; "
                    "a layer that torch.utils.checkpoint computes more than once in a step needs use_reentrant=False"
                )
            try:
                while len(self._works) < len(self._missing) and not self._missing[len(self._works)]:
                    self._start(len(self._works))
                self._drive()
            except PeerLostError as error:  # backward goes on to its end; ``finish`` tells
                self._lost = error
                self.abandon()
            self._seen()

        return ready

    def _drive(self) -> None:
        """Move the oldest sums under way; the links are full with theirs. Not at every hook of a deep model.

        A test in vain gives the CPU up for a moment, as what waits should, but backward is not waiting.
        """
        now = time.perf_counter()
        if now - self._driven < _DRIVE_S:
            return
        self._driven = now
        while self._under_way and self._under_way[0].test():
            self._under_way.popleft()
        for work in islice(self._under_way, 1, _DRIVEN):
            work.test()

    def _start(self, bucket: int) -> None:
        if not self._works:
            self._sums_began = time.perf_counter()
        gradient = self.buffer.flat[self.buffer.buckets[bucket].start : self.buffer.buckets[bucket].stop]
        if self.square_at is not None and self._weight:
            norm = torch.linalg.vector_norm(gradient)  # read on a CPU only: backward would wait for a GPU
            self._own_square += self._weight * (float(norm) if gradient.device.type == "cpu" else norm) ** 2
            if bucket == len(self.buffer.buckets) - 1:
                self.buffer.tail[self.square_at] = self._own_square
        if not self._weight:
            gradient.zero_()  # a mean over nothing is NaN, which 0 times it would stay
        elif self._weight != 1.0:
            gradient.mul_(self._weight)
        if bucket == len(self.buffer.buckets) - 1 and not self.in_parts:  # now all that will be are reached
            self.buffer.mark(self._reached)
        self._works.append(self.collective.start(bucket))
        self._under_way.append(self._works[-1])

    def abandon(self) -> None:
        """Wake the ranks that wait for this one's gradients."""
        self.collective.abandon()

    def retire(self) -> None:
        """Remove the hooks after a loss. The collective's memory must live on: messages may still arrive in it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Remove the hooks and free the collective."""
        self.retire()
        self.collective.close()
