"""Data-parallel training: the all-reduce of the gradients overlaps with the backward pass.

Rank r computes the mean loss of its b_r samples, and the gradient of this loss is multiplied by b_r / B. The sum over
ranks is the gradient of the mean over the B samples of the global batch, no matter how the batch is split. A loss can
also be a mean over tokens. The total number of tokens is known only after the reduction, so the gradient is divided by
this number afterwards.

After a backward pass that reaches every parameter, the rank waits for the reduction. A script therefore finds the
gradients of the global batch in ``p.grad`` and may clip or inspect them, as in one process. If the backward pass does
not reach some parameters (such as those of an unused head), another backward pass may reach these. In that case, the
rank waits in the optimizer's step, which calls ``whole``.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch.autograd import Variable

from dltrain.comm.core.collective import AllOf, Collective, Work
from dltrain.device.rank_device import finish
from dltrain.parallel.gradient_buffer import GradientBuffer
from dltrain.parallel.placement import Placement
from dltrain.protocol.errors import MisuseError, PeerLostError
from dltrain.timing.backward_passes import Passes
from dltrain.timing.stopwatch import Lap, reading

_DRIVE_S, _DRIVEN = 0.5e-3, 3
"""Minimum seconds between two checks of running reductions in the backward pass, and number of reductions per check."""


def square_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the squared norm of all tensors together.

    All norms are copied to main memory at once, because each copy waits for the GPU.
    """
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return sum(norm**2 for norm in torch.stack(norms).tolist()) if norms else 0.0


class DataParallel(Placement):
    """Reduce gradients over ranks in buckets. A hook starts the reduction of a bucket when its gradients are computed.

    Reductions start in the same order on every rank, even if the backward pass completes buckets in another order.
    Hooks also make progress on pending messages, because MPI makes progress only inside calls.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        collective: Callable[[list[torch.Tensor]], Collective],
        bucket_nbytes: int,
        tail: int,
        zeros: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None = None,
    ) -> None:
        """Allocate the buffer and register the hooks.

        ``collective``: returns the collective that reduces the buckets. ``bucket_nbytes``: maximum size of a bucket.
        ``tail``: number of values that ranks share at every step. ``zeros``: allocates the buffer for (number of
        elements, dtype, device); by default torch allocates it.
        """
        parameters = list(parameters)
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self.buffer = GradientBuffer(parameters, bucket_nbytes, tail, zeros, marked=not self.sharded)
        self.collective = collective(self.buffer.slices)
        self.exposed_s = 0.0
        """Seconds of the last step in which this rank waited for the reduction and did not compute."""
        self.waited = Lap()
        """Time of the current step in which calls of the script, such as ``backward``, waited for other ranks."""
        self.passes = Passes(self.buffer.flat.device)
        """A measurement of the duration of the current step's backward passes."""
        self.sum_s = 0.0
        """Seconds of the last step from the start of the first reduction to the end of the last one."""
        self._sums_began = 0.0
        self.square = 0.0
        """Squared norm of this rank's part of the last gradient. 0 if every rank has the whole gradient."""
        self.square_at: int | None = None
        """Index in the tail at which this rank shares its weight times the squared norm of its local gradient.

        The tail consists of the last values of the buffer. None: do not share this value.
        """
        self.measured_norm = 0.0
        """Norm of the global batch's gradient before the script changes it. Set only if ``square_at`` is set."""
        self.weight_at: int | None = None
        """Index of the value in the tail (the last values of the buffer) that contains the weight of each rank's loss.

        If its sum over ranks is not 0, the reduced gradient is divided by this sum. None: do not divide.
        """
        self._own_square: torch.Tensor | float = 0.0
        self._summed: list[float] = []
        """Marks and tail of the buffer (see ``gradient_buffer``), summed over ranks."""
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
        """True if ``finish`` has completed since ``begin``."""
        self._left = 1.0
        self._version: int | None = None
        self._lost: PeerLostError | None = None
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.buffer.parameters)
        ]

    def begin(self, weight: float, shared: list[float]) -> None:
        """Zero the gradients and begin a step.

        ``weight``: this rank's fraction of the global batch. ``shared``: this rank's values for the tail (the end of
        the gradient buffer), which ranks sum together with the gradients.

        Raise MisuseError if the script has made frozen parameters trainable.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            thawed = [tuple(p.shape) for p in self._frozen if p.requires_grad]
            raise MisuseError(
                f"model: found trainable parameters {thawed} that were frozen in t.wrap; expected no new ones, because "
                "ranks do not reduce their gradients. Freeze parameters only after t.wrap"
            )
        self.buffer.attach()
        self.buffer.set_tail(shared)
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
        """Write ``values`` into the tail (the end of the gradient buffer), starting at its index ``position``.

        Return False if no step is in progress or if the tail was already sent. Tensors are copied without being read,
        because reading would wait for the forward pass on a GPU.
        """
        if not self._open or len(self._works) == len(self.buffer.buckets):
            return False
        for offset, value in enumerate(values):
            self.buffer.tail[position + offset] = value
        self._seen()
        return True

    def weigh(self, weight: float) -> None:
        """Replace the weight of this rank's loss in this step. Raise MisuseError if the backward pass has begun."""
        if not self._open or self._works or self._reached:
            raise MisuseError("t.weigh: found a call after backward() has begun; expected it before backward()")
        self._weight = weight

    def unscaled(self, scale: float, left: float) -> None:
        """Record that a GradScaler has divided the reduced gradients, so that norms are reported without its scale.

        Call this after ``finish``. ``scale``: the factor by which the script multiplied its losses. ``left``: the
        factor that gradients still contain, 1 if the GradScaler has removed all of ``scale``.
        """
        self.measured_norm /= scale
        self._left = left
        self._seen()

    def rescale_residuals(self, factor: float) -> None:
        """Multiply the residuals of gradient compression (rounding errors of earlier steps) by ``factor``."""
        self.collective.rescale_residuals(factor)

    def gradient_norm(self) -> float:
        """Return the Euclidean norm of the gradient on this rank, before clipping."""
        norm = float(torch.linalg.vector_norm(self.buffer.gradient)) if self._norm is None else self._norm
        return norm / self._left

    def clip(self, max_norm: float) -> float:
        """Clip the global batch's gradient to a norm of at most ``max_norm``. Return the norm before clipping.

        Return 0 if the step was abandoned or a rank was lost; ``finish`` then raises PeerLostError.
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
        if self._norm > max_norm:
            self.buffer.gradient.mul_(max_norm / (self._norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self._seen()
        return self._norm

    def _norm_of_all(self) -> float:
        return self.gradient_norm()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside the context, without reducing them.

        The first backward pass after the context reduces the accumulated gradients.
        """
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def finish(self) -> list[float]:
        """Wait for the reduction of all gradients. Return the tail (the values after the gradients), summed over ranks.

        Afterwards, parameters that no rank's backward pass reached have no gradient, so optimizers skip them as in one
        process. Raise PeerLostError, and MisuseError if the script changed gradients before their reduction.
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
        """Wait until ``p.grad`` contains the gradients of the global batch.

        Raise PeerLostError, and MisuseError if the script changed gradients before their reduction.
        """
        if self._version not in (None, self.buffer.flat._version) and (self.sharded or not self._whole):
            raise MisuseError(
                "found gradients changed between backward() and opt.step() before they were reduced over ranks: "
                + ("each rank holds a part of them (parallelism.strategy Optimizer)" if self.sharded else self._rest)
                + ". Clip with t.clip_gradients(max_norm)"
            )
        if self._whole:
            return
        self._catch_up()
        began = time.perf_counter()
        if not self._reached:  # no backward pass, but the script may have written gradients into the buffer
            self._reached.update(index for index, view in enumerate(self.buffer.views) if bool(view.any()))
        for bucket in range(len(self._works), len(self.buffer.buckets)):
            for parameter in self.buffer.buckets[bucket].parameters:
                if self.buffer.adopt(parameter):
                    self._reached.add(parameter)  # the script has assigned another gradient
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
        self._summed = self.buffer.shared()
        if self.weight_at is not None and (weight := self._summed[len(self.buffer.marks) + self.weight_at]):
            self.buffer.gradient.div_(weight)
        self._whole = True
        if self.square_at is not None:
            self.measured_norm = self._norm_of_all()
        self._seen()

    def _catch_up(self) -> None:
        """Wait until the GPU has done its work. Otherwise its time would be measured as waiting for other ranks.

        The wait does not reduce the overlap of work, because all further work needs the reduced gradients.
        """
        finish(self.buffer.flat.device)

    def _backward_ended(self) -> None:
        """Finish a backward pass: if all reductions have started, wait for them.

        The autograd engine also calls this after a nested backward pass (of a reentrant checkpoint).
        """
        self._queued = False
        self.passes.end()
        if self._lost is not None or self._whole or self.sharded or len(self._works) < len(self.buffer.buckets):
            return
        self._catch_up()
        began = reading()
        try:
            self._wait_for_sums()
        except PeerLostError as error:  # ``finish`` raises it
            self._lost = error
            self.abandon()
        spent = reading() - began
        self.waited += spent
        self.exposed_s += spent.wall_s

    def _seen(self) -> None:
        """Store the version counter of the gradients' memory, with which later changes by the script are detected."""
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
                    "found a second backward pass in one step; expected one. Call opt.step() after each backward(), or "
                    "add up the losses and call backward() once, or use `with t.no_sync():` around all passes but the "
                    "last. A layer that torch.utils.checkpoint computes several times in a step needs "
                    "use_reentrant=False"
                )
            try:
                while len(self._works) < len(self._missing) and not self._missing[len(self._works)]:
                    self._start(len(self._works))
                self._drive()
            except PeerLostError as error:  # the backward pass continues; ``finish`` raises the error
                self._lost = error
                self.abandon()
            self._seen()

        return ready

    def _drive(self) -> None:
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

    def _start(self, bucket: int) -> None:
        if not self._works:
            self._sums_began = time.perf_counter()
        gradient = self.buffer.flat[self.buffer.buckets[bucket].start : self.buffer.buckets[bucket].stop]
        if self.square_at is not None and self._weight:
            norm = torch.linalg.vector_norm(gradient)  # read it only on a CPU: on a GPU the read would block
            self._own_square += self._weight * (float(norm) if gradient.device.type == "cpu" else norm) ** 2
            if bucket == len(self.buffer.buckets) - 1:
                self.buffer.tail[self.square_at] = self._own_square
        if not self._weight:
            gradient.zero_()  # the mean over no samples is NaN, and 0 * NaN is NaN
        elif self._weight != 1.0:
            gradient.mul_(self._weight)
        if bucket == len(self.buffer.buckets) - 1 and not self.sharded:  # ``_reached`` is complete now
            self.buffer.mark(self._reached)
        work = self.collective.start(bucket)
        if self.buffer.wide_tail and bucket == len(self.buffer.buckets) - 1:
            work = AllOf([work, self.collective.start(bucket + 1)])
        self._works.append(work)
        self._under_way.append(self._works[-1])

    def abandon(self) -> None:
        """Abort the reductions, so that other ranks do not wait for this one's gradients."""
        self.collective.abandon()

    def retire(self) -> None:
        """Remove the hooks after ranks were lost. Do not free the collective's memory: messages may still arrive."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Remove the backward hooks and free the collective that reduces the gradients."""
        self.retire()
        self.collective.close()
