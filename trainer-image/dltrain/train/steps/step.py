"""One step of synchronous training: the values that ranks exchange, the timing, and what happens if it is abandoned.

Ranks agree on the actions after a step with a few numbers at the end (tail) of the gradient buffer. A request to stop
or to save therefore needs no extra message, and takes effect on all ranks in the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from dltrain.batch.sampling import Part
from dltrain.device.rank_device import finish
from dltrain.elastic.buffer_copies import BufferCopies
from dltrain.elastic.team import Team
from dltrain.optim.grad_scaler import LEAST, Found, LossScale
from dltrain.optim.lr_scaling import Scaling
from dltrain.optim.noise_scale import NoiseScale
from dltrain.parallel.buffer_tail import WEIGHED, Agreed, Shared, pack, unpack
from dltrain.protocol.errors import DivergedError, MisuseError
from dltrain.timing.stopwatch import Stopwatch
from dltrain.train import usage_checks
from dltrain.train.progress import Progress


class StepRequests(NamedTuple):
    """Actions that this rank requests for the time after the step: to stop training, or to save the training's state.

    All ranks perform an action if at least one rank requests it. ``save``: write a checkpoint to the volume.
    """

    stop: bool
    save: bool
    keep: bool
    """Copy the state to the pods' memory, from which a restart in the same pods resumes."""
    copies: bool = False
    """True if this rank is able to copy the state to its pod's memory. This is information, not a request."""
    ending: bool = False
    """True if the next step is the last one of the epoch, because this rank's stream ends. This is information, too."""


@dataclass
class Update:
    """What has happened to the gradients of one optimizer since its last update."""

    received: bool = False
    scale: float | None = None
    """Loss scale, once a GradScaler has checked the gradients."""
    left_out: bool = False
    """True if the GradScalers of all ranks skip the update, because a gradient is not finite."""


class Step:
    """The training step in progress, on this rank. The same object is used for all steps."""

    _NOTHING: tuple[Tensor | float, float] = (0.0, 0.0)

    def __init__(
        self,
        team: Team,
        progress: Progress,
        scaling: Scaling,
        noise: NoiseScale,
        loss_scale: LossScale,
        watch: Stopwatch,
        device: torch.device,
    ) -> None:
        self._team, self._progress, self._scaling, self._noise, self.watch = team, progress, scaling, noise, watch
        self._loss_scale, self._device = loss_scale, device
        self.open = False
        """True from ``begin`` until the optimizer has updated the parameters."""
        self._is_updated = False
        """True after the update, while the body of the script's loop goes on with the same batch."""
        self.given_up = False
        """True if ranks were lost in this step, so that it will be computed again."""
        self.weight = 1.0
        """Weight of this rank's loss: its fraction of the batch, or the value passed to ``weigh``."""
        self.weight_by_samples = 1.0
        """This rank's fraction of the global batch, even if ``weigh`` has replaced ``weight``."""
        self.samples = 0
        """The global batch size of the step."""
        self.agreed_step = Agreed(Shared(), [], [], [])
        """Values that ranks exchanged in this step: sums over ranks, and each rank's times in the previous step."""
        self.exposed_s: list[float] = []
        """Seconds of communication of each worker in the previous step that did not overlap with computing."""
        self.update_due = False
        """True if this rank sends a progress update to its agent after this step."""
        self.gradient_norm: float | None = None
        """Last finite gradient norm. It is measured if a progress update is due or if ranks agreed to save or stop."""
        self.partial = False
        """True in all but the last micro-batch of a step. The optimizer then makes no update."""
        self.skipped_update = False
        """True if the script has called ``optimizer.step()`` in the current micro-batch, which is not the last one."""
        self.logged_by_run = False
        """True if ``t.run`` has logged the loss of the current micro-batch. Later calls of ``log`` are ignored."""
        self._micro_batches = self._weighed = 0
        """Numbers of micro-batches of the step so far, and of those in which the script called ``weigh``."""
        self._logged = self._logged_before = self._NOTHING
        """(Loss times weight, weight) of the current micro-batch and of the earlier ones, for the progress update."""
        self._tokens_before = 0.0
        """Sum of the weights that the script passed to ``weigh`` in earlier micro-batches of the step."""
        self._updates = [Update()]
        """The updates of this step, in the order of the optimizers. ``_update``: the one of the selected optimizer."""
        self._update = self._updates[0]
        self._agreed = False
        """True if ranks have exchanged the tail in this step, with the gradients of any optimizer."""
        self._updated_some = False
        """True if any of several optimizers has made an update in this step."""
        self.unscaled = False
        """True if a GradScaler has divided the gradients of this step by the loss scale."""
        self._carried_scale = 1.0
        """Loss scale that the residuals of gradient compression contain."""
        self._measuring = False
        """True if ranks exchange the norms of their local gradients in this step, for the gradient noise scale."""
        self._late = (0.0, 0.0)
        """(Loss times weight, weight) of a loss that was logged after the reduction. The next step reports it."""
        self._buffers_before: BufferCopies | None = None

    def expect(self, optimizers: int) -> None:
        """Let each of ``optimizers`` make any number of updates in a step, which ``end`` closes.

        A step of one optimizer has one update, which closes it.
        """
        self._updates = [Update() for _ in range(optimizers)]

    def select(self, number: int) -> None:
        """Let the next calls concern the update of optimizer ``number``, in the order of ``t.wrap``."""
        self._update = self._updates[number]
        self._team.parallel.select(number)

    def begin(self, part: Part, number: int, steps: int, requests: StepRequests, *, accumulates: bool = False) -> None:
        """Begin step ``number`` (counted from 0) of ``steps``.

        ``part``: this rank's samples. ``requests``: what this rank wants to happen after the step. ``accumulates``:
        True if the step has several micro-batches, each of which begins with ``begin_micro_batch``.
        """
        team = self._team
        self.weight = self.weight_by_samples = part.weight
        self._number, self._last, self.samples = number, number == steps - 1, part.batch
        whole = part.batch == team.plan.global_batch
        self._measuring = team.measure(number, steps, always=self._scaling.measures) and whole
        requested = float(requests.stop), float(requests.save), float(requests.keep)
        copies, ending = float(requests.copies), float(requests.ending)
        shared = Shared(*self._late, *requested, square=team.parallel.square, copies=copies, ending=ending)
        self._late = (0.0, 0.0)
        times = self._progress.times
        tail = pack(shared, team.rank, team.size, times.compute_s, times.exposed_s, self.watch.demanded_s)
        team.parallel.begin(part.weight, tail, accumulates=accumulates)
        self.partial, self._micro_batches, self._weighed, self._tokens_before = False, 0, 0, 0.0
        self._logged = self._logged_before = self._NOTHING
        self._carry()
        self._buffers_before = BufferCopies(team.model) if team.elastic.active else None
        self.open, self.given_up, self.logged_by_run = True, False, False
        self._is_updated = self._agreed = self._updated_some = self.unscaled = False
        self._updates = [Update() for _ in self._updates]
        self._update = self._updates[0]

    def begin_micro_batch(self, part: Part, *, last: bool) -> None:
        """Begin a micro-batch of the step. ``part``: its samples. ``last``: True for the step's last micro-batch."""
        if self._micro_batches:
            (loss, weight), (more, added) = self._logged_before, self._logged
            self._logged_before = (loss + more, weight + added)
            self._tokens_before += self.weight if self._weighed else 0.0
        self._logged = self._NOTHING
        self._micro_batches += 1
        self.weight = self.weight_by_samples = part.weight
        self.partial, self.skipped_update, self.logged_by_run = not last, False, False
        self._team.parallel.begin_micro_batch(part.weight, last=last)

    def log(self, loss: Tensor | float) -> None:
        """Log the mean loss of this rank's batch or micro-batch. Ranks exchange the loss together with the gradients.

        A loss that is logged after the gradients were reduced is exchanged in the next step.
        """
        if self.logged_by_run:
            return
        if self.open and isinstance(loss, Tensor) and loss.requires_grad and loss.grad_fn is not None:
            loss.register_hook(lambda _: self._team.parallel.passes.start())  # type: ignore[no-untyped-call]
        weighed = usage_checks.number(loss) * self.weight if self.weight else 0.0
        self._logged = (weighed, self.weight)
        both = [a + b for a, b in zip(self._logged_before, self._logged, strict=True)]
        if not self._team.parallel.share(0, both):
            self._late = (float(weighed), self.weight)

    def weigh(self, tokens: float) -> None:
        """Weight this rank's loss by ``tokens``, the number of tokens in its mean, instead of samples.

        Raise MisuseError for a negative or infinite number, and if the backward pass has begun.
        """
        usage_checks.check_divides_samples("t.weigh", self._team.plan)
        if self._micro_batches and len(self._updates) > 1:
            raise MisuseError(
                "t.weigh: found a call in a micro-batch with several optimizers; expected losses that are means over "
                "samples, because the numbers of tokens of different losses would be mixed. Use one optimizer, or turn "
                "off gradient accumulation (spec.parallelism.gradientAccumulation: Never)"
            )
        counted = usage_checks.check_tokens(tokens)
        # A rank without samples computes a sample of another rank. This sample must not count twice.
        self.weight = counted if self.weight_by_samples else 0.0
        self._team.parallel.weigh(self.weight)
        self._weighed += 1
        self._team.parallel.share(WEIGHED, (1.0, self._tokens_before + self.weight))

    def sum(self) -> None:
        """Wait for the reduced gradients before an update of the optimizer. Outside of a step, do nothing.

        If ranks were lost meanwhile, abandon the step (``given_up``) and return. Raise DivergedError if a loss or
        gradient is not finite, PeerLostError if the run cannot continue without the lost ranks, and MisuseError for
        a second update with the same batch, for which several workers would not sum the gradients.
        """
        if self._is_updated and self._team.workers > 1:
            raise MisuseError(usage_checks.SECOND_UPDATE)
        if not self.open:
            return  # an update outside of the loop over steps: dltrain does nothing
        if not self._receive() or self._update.left_out:
            return
        team, parallel, agreed = self._team, self._team.parallel, self.agreed_step.shared
        if self._update.scale is not None:
            parallel.whole()  # raises if the script has changed the gradient since
        if self._measuring:
            within = agreed.within / (agreed.weight or 1.0) / (self._update.scale or 1.0) ** 2
            together = parallel.measured_norm**2
            self._scaling.observe(within, together, team.workers)
            self._noise.observe(within, together, team.workers)
        if not team.shares[team.rank]:
            return  # a parameter server does not know the loss scale
        if self.update_due or agreed.save or agreed.stop or agreed.keep:
            norm = self._finite(parallel.gradient_norm(), "norm of the gradient")
            self.gradient_norm = sqrt(agreed.square) if 0 < agreed.square < inf else norm

    def unscale(self, divide: Callable[[], Found], nothing: Found, scale: float, inverse: float) -> Found:
        """Divide the reduced gradients by the loss scale for a GradScaler. Return flags for non-finite gradients.

        A GradScaler is torch's loss scaling for 16-bit training. The flags, one per device, are the same on all ranks:
        1 if a gradient of any rank is not finite. ``divide``: multiplies the gradients by ``inverse``, checks them and
        returns the flags of this rank. ``nothing``: flags to return if there are no gradients or if ranks were lost.
        ``scale``: the loss scale. Raise the errors of ``sum``, and DivergedError if a gradient is not finite even at
        the minimum loss scale.
        """
        if self.partial or not self._receive():
            return nothing
        parallel = self._team.parallel
        found = divide() or nothing
        parallel.unscaled(scale, scale * inverse)
        self._update.scale = self._carried_scale = scale
        self.unscaled = True
        self._update.left_out = parallel.any_rank(any(bool(part) for part in found.values()))
        if self._update.left_out:
            if scale < LEAST:
                what = f"at a loss scale of {scale:.2g}; expected finite ones. Check the loss and the learning rate"
                raise DivergedError(f"gradients are not finite at step {self._number}, even {what}")
            for part in found.values():
                part.fill_(1.0)
            if self._team.plan.compression:
                parallel.rescale_residuals(0.0)
        return found

    @property
    def left_out(self) -> bool:
        """Return True if the GradScalers of all ranks skip the selected update, as a gradient is not finite."""
        return self._update.left_out

    def _carry(self) -> None:
        """Multiply the residuals of gradient compression (rounding errors of earlier steps) to match a new loss scale.

        The residuals contain the loss scale at which they arose, and are added to the next gradients.
        """
        if self._team.plan.compression and (scale := self._loss_scale.scale) is not None:
            self._team.parallel.rescale_residuals(scale / self._carried_scale)
            self._carried_scale = scale

    def _receive(self) -> bool:
        """Wait for the reduction of gradients, and read the values (loss, requests, times) that ranks exchange with it.

        Return True if the reduced gradients are there, False if the step was abandoned because ranks were lost. After a
        call has returned True, later calls in the same step do nothing and also return True.
        """
        if self._update.received:
            return True
        usage_checks.check_weighed(self._weighed, self._micro_batches)
        team, parallel = self._team, self._team.parallel
        self._synchronize()  # otherwise the backward pass would count as communication
        self.watch.computed(parallel.waited)
        self.watch.differentiated(parallel.passes.seconds)
        if self.given_up:  # ranks were lost in a reduction that the script called
            self.give_up()
            return False
        total = team.elastic.run_or_abort(parallel.finish, parallel.abandon)
        if total is None:
            team.continue_after_loss(self._number)
            return False
        self.watch.waited()
        self._update.received = True
        received = unpack(total, team.size)
        if received.shared.weighed:
            team.check_weights(received.shared, self._number)
        if self._agreed:  # the values came with the first update of the step
            return True
        self._agreed, self.agreed_step = True, received
        agreed, exposed = received.shared, received.exposed
        self.exposed_s = [e for e, share in zip(exposed, team.shares, strict=True) if share] if any(exposed) else []
        if agreed.logged:
            self._progress.add_loss(self._finite(agreed.loss / agreed.logged, "loss"))
        self.update_due = self._progress.due(last=self._last)
        return True

    def _finite(self, value: float, what: str) -> float:
        if not isfinite(value):
            raise DivergedError(
                f"{what} is {value} at step {self._number}; expected a finite number. Try to lower the learning rate"
            )
        return value

    def updated(self) -> bool:
        """Close the step after an update of the optimizer, and measure the time of the update.

        Return True if the step is complete, False if it was already closed, was abandoned after a loss of ranks, or may
        have further updates of several optimizers. With a sharded optimizer, also exchange the updated parameters.
        """
        if not self.open:
            return False
        several = len(self._updates) > 1
        self.open = several
        if self.given_up:
            return False
        parallel = self._team.parallel
        if parallel.sharded:
            # Measure the update separately from the following exchange of parameters. Without a sharded optimizer,
            # there is no wait, so the update of a GPU overlaps with what the script does next.
            self._synchronize()
        self.watch.computed()
        if self._update.left_out:
            self._loss_scale.skipped += 1
        else:
            parallel.spread()
            if parallel.sharded:
                self._synchronize()
        self.watch.waited()
        parallel.updated()
        if several:
            self._updates = [Update() if update is self._update else update for update in self._updates]
            self._updated_some = True
            return False
        self._is_updated = True
        return True

    def end(self) -> bool:
        """Close the step of several optimizers after the script's work with the batch.

        Return True if the step is complete, and False if it was closed already or if no optimizer has made an update.
        """
        if not self.open or not self._updated_some:
            return False
        self.open = False
        return True

    def give_up(self) -> None:
        """Abandon the step after a loss of ranks, so that the remaining ranks can compute it again.

        Discard its gradients, so that an update changes no parameter, and undo its changes of the model's buffers.
        """
        self.given_up = True
        for parameter in self._team.model.parameters():
            parameter.grad = None  # optimizers skip such parameters
        if self._buffers_before is not None:
            self._buffers_before.restore()  # undo the update of running statistics in forward

    def count(self, fetch_s: float, *, first: bool) -> None:
        """Record the times of the finished step, and adapt the local batch sizes of all ranks to them.

        ``fetch_s``: seconds to load the step's batch, here or in a worker. ``first``: True for the first step of
        this process, which allocates and compiles.
        """
        self._is_updated = False
        team, agreed = self._team, self.agreed_step
        agree_s = team.elastic.agree_s
        times = self.watch.times(team.parallel.exposed_s + agree_s, agree_s, fetch_s, team.parallel.sum_s)
        if first:
            self._progress.warm_up(times, self.samples, team.shares[team.rank])
            return
        self._progress.add(times, self.samples, team.shares[team.rank], self.exposed_s)
        if self._device.type == "cpu":
            self.watch.demand()
        team.balance(self._number + 1, agreed.computed, self.exposed_s, agreed.demanded)

    def _synchronize(self) -> None:
        finish(self._device)
