"""Data-parallel training: the all-reduce of the gradients overlaps with the backward pass.

Rank r computes the mean loss of its b_r samples, and the gradient of this loss is multiplied by b_r / B. The sum over
ranks is the gradient of the mean over the B samples of the global batch, no matter how the batch is split. A loss can
also be a mean over tokens. The total number of tokens is known only after the reduction, so the gradient is divided by
this number afterwards.

After a backward pass, the rank waits for the reduction. A script therefore finds the gradients of the global batch in
``p.grad`` and may clip or inspect them, as in one process. A parameter that the pass does not reach (such as that of an
unused head) holds up no bucket, and a later pass of the same step may still reach it (``unused_parameters``). If steps
have several passes, the rank waits after the last one, or in the optimizer's step, which calls ``whole``.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd import Variable

from dltrain.comm.algorithms.single_rank import SingleRank
from dltrain.comm.core.collective import Collective
from dltrain.device.rank_device import finish
from dltrain.parallel import gradient_checks
from dltrain.parallel.bucket_reductions import BucketReductions
from dltrain.parallel.gradient_buffer import GradientBuffer
from dltrain.parallel.placement import Strategy
from dltrain.parallel.unused_parameters import UnusedParameters
from dltrain.protocol.errors import MisuseError, PeerLostError
from dltrain.timing.stopwatch import Lap, reading

_EXACT_MARKS = 256
"""Largest number of ranks up to which a sum of ones, one per rank, is exact in 16 bits (bfloat16)."""


class DataParallel(Strategy):
    """Reduce gradients over ranks in buckets. A hook starts the reduction of a bucket when its gradients are computed.

    Reductions start in the same order on every rank, even if the backward pass completes buckets in another order.
    Hooks also make progress on pending messages, because MPI makes progress only inside calls.
    """

    sums_in_backward = True
    """False if the rank waits for the reductions only in ``finish``, instead of at the end of a backward pass."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        collective: Callable[[list[torch.Tensor]], Collective],
        bucket_nbytes: int,
        tail: int,
        zeros: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None = None,
        agreement: Callable[[list[torch.Tensor]], Collective] | None = None,
    ) -> None:
        """Allocate the buffer and register the hooks.

        ``collective``: returns the collective that reduces the buckets. ``bucket_nbytes``: maximum size of a bucket.
        ``tail``: number of values that ranks share at every step. ``zeros``: allocates the buffer for (number of
        elements, dtype, device); by default torch does. ``agreement``: returns the collective with which ranks agree on
        late gradients (see ``unused_parameters``). If it is None and there are several ranks, the bucket of a parameter
        that a backward pass does not reach is reduced only in the optimizer's step.
        """
        parameters = list(parameters)
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self.buffer = GradientBuffer(parameters, bucket_nbytes, tail, zeros, marked=not self.sharded)
        self.collective = collective(self.buffer.slices)
        super().__init__(self.buffer.flat.device)
        self._reductions = BucketReductions(self.buffer, self.collective, marked=not self.sharded)
        self._summed: list[float] = []
        """Marks and tail of the buffer (see ``gradient_buffer``), summed over ranks."""
        if agreement is None and self.collective.size == 1 and not self.sharded:
            agreement = SingleRank
        self._unused = None if agreement is None else UnusedParameters(self.buffer, self._reductions, agreement)
        self._open = False
        self._partial = self._has_gradients = False
        self._queued = self._whole = self._settled = False
        self._complete = False
        """True if the backward passes of all ranks reached every parameter, so that no gradient can be late."""
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

    @property
    def gradient_nbytes(self) -> int:
        return self.buffer.gradient.nbytes

    @property
    def tail_length(self) -> int:
        return self.buffer.tail.numel()

    def begin(self, weight: float, shared: list[float], *, accumulates: bool = False) -> None:
        """Zero the gradients and begin a step.

        ``weight``: this rank's fraction of the global batch. ``shared``: this rank's values for the tail (the end of
        the gradient buffer), which ranks sum together with the gradients. ``accumulates``: True if the step has several
        micro-batches, each of which begins with ``begin_micro_batch``. Raise MisuseError if the script has made frozen
        parameters trainable.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise gradient_checks.thawed([tuple(p.shape) for p in self._frozen if p.requires_grad])
        self.buffer.attach()
        self.buffer.set_tail(shared)
        self._reductions.begin(weight, self.square_at, accumulates=accumulates)
        if self._unused is not None:
            self._unused.begin()
        self.exposed_s, self._waited = 0.0, Lap()
        self.passes.begin()
        self._queued = self._whole = self._settled = self._partial = self._has_gradients = False
        self._norm = self._version = None
        self._open, self._finished, self._left = True, False, 1.0

    def begin_micro_batch(self, weight: float, *, last: bool) -> None:
        """Begin a micro-batch of the step. Backward passes of all but the last micro-batch start no reduction.

        ``weight``: the micro-batch's fraction of the global batch. Until the gradients are reduced, ``p.grad`` is None
        between backward passes, so that a script's ``zero_grad`` and clipping cannot change the accumulated gradients.
        """
        for index in range(len(self.buffer.parameters)):  # gradients that the script has assigned
            self._reductions.adopt(index)
        self._seen()
        self.buffer.release()
        self._reductions.begin_micro_batch(weight)
        self._partial, self._has_gradients = not last, False

    def share(self, position: int, values: Sequence[torch.Tensor | float]) -> bool:
        """Write ``values`` into the tail (the end of the gradient buffer), starting at its index ``position``.

        Return False if no step is in progress or if the tail was already sent. Tensors are copied without being read,
        because reading would wait for the forward pass on a GPU.
        """
        if not self._open or self._reductions.all_started:
            return False
        for offset, value in enumerate(values):
            self.buffer.tail[position + offset] = value
        self._seen()
        return True

    def weigh(self, weight: float) -> None:
        """Replace the weight of this rank's loss in this step. Raise MisuseError if the backward pass has begun."""
        if not self._open or self._reductions.any_started or self._has_gradients:
            raise MisuseError("t.weigh: found a call after backward() has begun; expected it before backward()")
        self._reductions.weight = weight

    def unscaled(self, scale: float, left: float) -> None:
        """Record that a GradScaler has divided the reduced gradients, so that norms are reported without its scale.

        Call this after ``finish``. ``scale``: the factor by which the script multiplied its losses. ``left``: the
        factor that gradients still contain, 1 if the GradScaler has removed all of ``scale``.
        """
        self.measured_norm /= scale
        self._left = left
        self._seen()

    def rescale_residuals(self, factor: float) -> None:
        """Multiply the residuals (rounding errors) of gradient compression by ``factor``, as for a new loss scale."""
        self.collective.rescale_residuals(factor)

    def gradient_norm(self) -> float:
        """Return the norm of the last step's gradient of the global batch, before clipping and without loss scale."""
        norm = float(torch.linalg.vector_norm(self.buffer.gradient)) if self._norm is None else self._norm
        return norm / self._left

    def clip(self, max_norm: float) -> float:
        """Clip the global batch's gradient to a norm of at most ``max_norm``. Return the norm before clipping.

        Return 0 without clipping before the last micro-batch, and if the step was abandoned or a rank was lost;
        ``finish`` then raises PeerLostError.
        """
        if not (self._open or self._finished) or self._lost is not None or self._partial:
            return 0.0
        self._catch_up()
        began = reading()
        try:
            self.whole()
            self._waited += reading() - began
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

    @property
    def _accumulates(self) -> bool:
        """True if the current backward pass only adds to the accumulated gradients."""
        return self._no_sync or self._partial

    def finish(self) -> list[float]:
        """Wait for the reduction of all gradients. Return the tail (the values after the gradients), summed over ranks.

        Afterwards, parameters that no rank's backward pass reached have no gradient, so optimizers skip them as in one
        process. Raise PeerLostError if a rank is lost, and MisuseError if the script changed unreduced gradients.
        """
        assert self._open, "begin comes before finish"
        self._open = False
        if self._lost is not None:
            raise self._lost
        self.whole()
        self.buffer.detach(self._summed)
        self._finished = True
        return self._summed[len(self.buffer.marks) :]

    def whole(self) -> None:
        """Wait until ``p.grad`` contains the gradients of the global batch.

        Raise PeerLostError if a rank is lost, and MisuseError if the script changed gradients before their reduction.
        """
        if self._version not in (None, self.buffer.flat._version) and (self.sharded or not self._whole):
            unused = len(self.buffer.parameters) - len(self._reductions.reached)
            raise gradient_checks.changed_too_early(sharded=self.sharded, unused=unused)
        if self._whole:
            self._settle(final=True)
            return
        self._catch_up()
        began = time.perf_counter()
        self._reductions.start_rest()
        self._wait_for_sums()
        self._settle(final=True)
        self.exposed_s += time.perf_counter() - began

    def _wait_for_sums(self) -> None:
        self._reductions.wait()
        self._catch_up()
        self.sum_s = time.perf_counter() - self._reductions.began
        self._summed = self.buffer.shared()
        exact = self.collective.size <= _EXACT_MARKS or not self.buffer.wide_tail
        self._complete = exact and all(mark == self.collective.size for mark in self._summed[: len(self.buffer.marks)])
        if divisor := self._divisor():
            self.buffer.gradient.div_(divisor)
        if self._reductions.accumulates:
            self.buffer.restore()
        self._whole = True
        self._measure()

    def _measure(self) -> None:
        if self.square_at is not None:
            self.measured_norm = self._norm_of_all()
        self._seen()

    def _settle(self, *, final: bool) -> None:
        """Reduce gradients that are late on any rank, that is, came after the reduction of their bucket.

        ``final``: True if no late gradient can follow on this rank in this step. Raise PeerLostError if a rank is lost.
        """
        if self._unused is None or self._settled:
            return
        ended = self._complete
        while not ended:
            late, ended = self._unused.agree(final=final)
            self._add_late(late)
            if not final:
                return
        self._settled = final

    def _add_late(self, ranks: Sequence[float]) -> None:
        """Add late gradients. ``ranks``: for each parameter, the number of ranks that have a late gradient."""
        assert self._unused is not None
        if not any(ranks):
            return
        if self._version not in (None, self.buffer.flat._version):
            why = "another backward pass on some ranks added gradients that ranks have not reduced yet"
            raise gradient_checks.changed(why)
        self._reductions.add_late(ranks, self._unused.take, self._divisor())
        for index, count in enumerate(ranks):
            if count:
                self._summed[index] += count
                self.buffer.parameters[index].grad = self.buffer.views[index]
        self._measure()

    def _divisor(self) -> float:
        """Return the sum of all ranks' weights (tokens), by which to divide reduced gradients; 0: do not divide."""
        return 0.0 if self.weight_at is None else self._summed[len(self.buffer.marks) + self.weight_at]

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
        if self._lost is not None or self.sharded or not self._open or not self.sums_in_backward:
            return
        began = reading()
        try:
            if self._unused is not None and not self._accumulates:
                self._unused.end_pass()
            late = self._unused is not None and bool(self._unused.late)
            if not self._reductions.all_started or (self._whole and not late):
                return
            self._catch_up()
            began = reading()
            if not self._whole:
                self._wait_for_sums()
                self.buffer.detach(self._summed)
            if late:
                self._settle(final=False)
        except PeerLostError as error:  # ``finish`` raises it
            self._lost = error
            self.abandon()
        spent = reading() - began
        self._waited += spent
        self.exposed_s += spent.wall_s

    def _seen(self) -> None:
        """Store the version counter of the gradients' memory, with which later changes by the script are detected."""
        if self._version is not None or self._reductions.reached:
            self._version = self.buffer.flat._version

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if not self._open or self._lost is not None:
                return
            self._has_gradients = True
            if not self._queued:
                Variable._execution_engine.queue_callback(self._backward_ended)
                self._queued = True
                self.passes.start()
                if self._unused is not None and not self._accumulates:
                    self._unused.begin_pass()
            skipped = self._unused is not None and self._unused.was_skipped(index) and not self._settled
            if self._unused is not None and skipped and self._unused.came(index, again=self._accumulates):
                self._reductions.reached.add(index)
                return
            self._reductions.adopt(index)
            self._reductions.reached.add(index)
            if self._accumulates:
                self._seen()
                return
            if not self._reductions.came(index) and not skipped:
                raise gradient_checks.second_pass()
            try:
                self._reductions.start_complete()
                self._reductions.drive()
            except PeerLostError as error:  # the backward pass continues; ``finish`` raises the error
                self._lost = error
                self.abandon()
            self._seen()

        return ready

    def abandon(self) -> None:
        """Abort the reductions, so that other ranks do not wait for this one's gradients."""
        self.collective.abandon()
        if self._unused is not None:
            self._unused.abandon()

    def retire(self) -> None:
        """Remove the hooks after ranks were lost. Do not free the collective's memory: messages may still arrive."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._unused is not None:
            self._unused.retire()

    def close(self) -> None:
        """Remove the backward hooks and free the collective that reduces the gradients."""
        self.retire()
        self.collective.close()
        if self._unused is not None:
            self._unused.close()
