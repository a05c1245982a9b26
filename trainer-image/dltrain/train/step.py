"""One step of lockstep: what ranks tell each other in it and agree on, what it takes, how it is given up.

Ranks agree on what happens after a step by a few numbers that travel with the gradients (``tail``), so that a wish to
stop or to save costs no message and takes effect on all of them at the same step.
"""

from collections.abc import Callable
from math import inf, isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from dltrain.batch.sampling import Part
from dltrain.device.rank_device import finish
from dltrain.elastic.team import Team
from dltrain.optim.grad_scaler import LEAST, Found, LossScale
from dltrain.optim.lr_scaling import Scaling
from dltrain.optim.noise_scale import NoiseScale
from dltrain.parallel.buffer_tail import WEIGHED, Agreed, Shared, pack, unpack
from dltrain.protocol.errors import DivergedError, MisuseError
from dltrain.timing.stopwatch import Stopwatch
from dltrain.train import usage_checks
from dltrain.train.progress import Progress


class Wishes(NamedTuple):
    """What this rank would have all do after the step; one that wishes is enough."""

    stop: bool
    save: bool
    keep: bool
    """The state in the pods' memory."""


class Step:
    """The one under way; the same object for all of them, one after the other."""

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
        """Whether its update is still to come."""
        self.given_up = False
        """Whether it will be computed again."""
        self.weight = 1.0
        """Of this rank's part of the batch: by samples, or as the script weighs it."""
        self.weight_by_samples = 1.0
        """b_r / B, whatever the script says."""
        self.samples = 0
        """B, of the step under way."""
        self.agreed_step = Agreed(Shared(), [], [], [])
        """What all ranks told in it, and their times of the step before."""
        self.exposed_s: list[float] = []
        """Of those that compute, in the step before."""
        self.news_due = False
        self.gradient_norm: float | None = None
        """Where ``news_due``, or all agreed to save; of the last step that had a finite one."""
        self.left_out = False
        """Whether a GradScaler leaves out its update, on all ranks."""
        self._received = False
        self._scale: float | None = None
        """What a GradScaler, that has looked at the gradients, had multiplied losses by."""
        self._carried_scale = 1.0
        """And were, when what compression carries over was rounded away."""
        self._measuring = False
        """Whether ranks tell the norms of their own gradients."""
        self._late = (0.0, 0.0)
        """Loss that was logged after its step had been summed, and its weight: told with the next one."""
        self._buffers_before: list[Tensor] = []

    def begin(self, part: Part, number: int, steps: int, wishes: Wishes) -> None:
        """Step ``number``, from 0, of ``steps``. Its batch is here."""
        team = self._team
        self.weight = self.weight_by_samples = part.weight
        self._number, self._last, self.samples = number, number == steps - 1, part.batch
        whole = part.batch == team.plan.global_batch
        self._measuring = team.measure(number, steps, always=self._scaling.measures) and whole
        requested = float(wishes.stop), float(wishes.save), float(wishes.keep)
        shared = Shared(*self._late, *requested, square=team.parallel.square)
        self._late = (0.0, 0.0)
        times = self._progress.times
        tail = pack(shared, team.rank, team.size, times.compute_s, times.exposed_s, self.watch.demanded_s)
        team.parallel.begin(part.weight, tail)
        self._carry()
        self._buffers_before = [buffer.clone() for buffer in team.model.buffers()] if team.elastic.active else []
        self.open, self.given_up = True, False
        self.left_out = self._received = False
        self._scale = None

    def log(self, loss: Tensor | float) -> None:
        """The mean loss of this rank's part."""
        if self.open and isinstance(loss, Tensor) and loss.requires_grad and loss.grad_fn is not None:
            loss.register_hook(lambda _: self._team.parallel.passes.start())  # type: ignore[no-untyped-call]
        weighed = usage_checks.number(loss) * self.weight if self.weight else 0.0
        if not self._team.parallel.share(0, (weighed, self.weight)):
            self._late = (float(weighed), self.weight)

    def weigh(self, tokens: float) -> None:
        """See ``Trainer.weigh``."""
        if not 0 <= tokens < inf:
            raise MisuseError(f"t.weigh: found {tokens} tokens, expected the number that the loss is the mean of")
        self.weight = float(tokens) if self.weight_by_samples else 0.0  # 0: a sample that was not this rank's to count
        self._team.parallel.weigh(self.weight)
        self._team.parallel.share(WEIGHED, (1.0, self.weight))

    def sum(self) -> None:
        """Before an update: wait for the gradients of all. ``given_up`` if ranks were lost meanwhile.

        Raises DivergedError for a loss or gradient that is not finite, PeerLostError.
        """
        if not self.open:
            return  # outside of the loop it is the script's own business
        if not self._receive() or self.left_out:
            return
        team, parallel, agreed = self._team, self._team.parallel, self.agreed_step.shared
        if self._scale is not None:
            parallel.whole()  # whether the script changed it since
        if self._measuring:
            within = agreed.within / (agreed.weight or 1.0) / (self._scale or 1.0) ** 2
            together = parallel.measured_norm**2
            self._scaling.observe(within, together, team.workers)
            self._noise.observe(within, together, team.workers)
        if not team.shares[team.rank]:
            return  # a parameter server, which knows of no loss scale
        if self.news_due or agreed.save or agreed.stop or agreed.keep:
            norm = self._finite(parallel.gradient_norm(), "norm of the gradient")
            self.gradient_norm = sqrt(agreed.square) if 0 < agreed.square < inf else norm

    def unscale(self, divide: Callable[[], Found], nothing: Found, scale: float, inverse: float) -> Found:
        """A GradScaler multiplies gradients by ``inverse`` and looks at them, by ``divide``; they have to be the whole
        batch's by then. What it found, on any rank; ``nothing``: the same without a gradient.

        Raises as ``sum``, and DivergedError for a gradient that is not finite whatever the scale.
        """
        if not self._receive():
            return nothing
        parallel = self._team.parallel
        found = divide() or nothing
        parallel.unscaled(scale, scale * inverse)
        self._scale = self._carried_scale = scale
        self.left_out = parallel.on_any(any(bool(part) for part in found.values()))
        if self.left_out:
            if scale < LEAST:
                what = f"at a loss scale of {scale:.2g}: lower the learning rate, or look for a loss that is not finite"
                raise DivergedError(f"gradients are not finite at step {self._number}, even {what}")
            for part in found.values():
                part.fill_(1.0)
            if self._team.plan.compression:
                parallel.carry(0.0)
        return found

    def _carry(self) -> None:
        """Bring what compression carries over into this step's unit."""
        if self._team.plan.compression and (scale := self._loss_scale.scale) is not None:
            self._team.parallel.carry(scale / self._carried_scale)
            self._carried_scale = scale

    def _receive(self) -> bool:
        """Wait for the gradients of all, once in a step, and learn what they told; False where it is given up."""
        if self._received:
            return True
        team, parallel = self._team, self._team.parallel
        self._synchronize()  # else backward would count as communication
        self.watch.computed(parallel.waited)
        self.watch.differentiated(parallel.passes.seconds)
        if self.given_up:  # ranks were lost in a sum of the script's own
            self.give_up()
            return False
        total = team.elastic.attempt(parallel.finish, parallel.abandon)
        if total is None:
            team.go_on(self._number)
            return False
        self.watch.waited()
        self.agreed_step = unpack(total, team.size)
        agreed, exposed = self.agreed_step.shared, self.agreed_step.exposed
        if agreed.weighed:
            team.check_weights(agreed, self._number)
        self.exposed_s = [e for e, share in zip(exposed, team.shares, strict=True) if share] if any(exposed) else []
        if agreed.logged:
            self._progress.add_loss(self._finite(agreed.loss / agreed.logged, "loss"))
        self.news_due = self._progress.due(last=self._last)
        self._received = True
        return True

    def _finite(self, value: float, what: str) -> float:
        if not isfinite(value):
            raise DivergedError(f"{what} is {value} at step {self._number}: lower the learning rate")
        return value

    def updated(self) -> bool:
        """After an update; whether it made a step. That ends here: what a script does next is no part of it."""
        if not self.open:
            return False
        self.open = False
        if self.given_up:
            return False
        parallel = self._team.parallel
        if parallel.in_parts:  # else a GPU's update goes on beside what the script does next, and counts with that
            self._synchronize()
        self.watch.computed()
        if self.left_out:
            self._loss_scale.skipped += 1
        else:
            parallel.spread()
            if parallel.in_parts:
                self._synchronize()
        self.watch.waited()
        return True

    def give_up(self) -> None:
        """Leave model and optimizer as they were before: it will be computed again."""
        self.given_up = True
        for parameter in self._team.model.parameters():
            parameter.grad = None  # which optimizers pass over
        with torch.no_grad():
            for buffer, before in zip(self._team.model.buffers(), self._buffers_before, strict=True):
                buffer.copy_(before)  # running statistics that forward has moved on

    def count(self, fetch_s: float, *, first: bool) -> None:
        """Once it is done: learn from what it took. ``fetch_s``: making its batch, whoever did it; ``first``: of this
        process, which allocates and compiles.
        """
        team, agreed = self._team, self.agreed_step
        agree_s = team.elastic.agree_s
        times = self.watch.times(team.parallel.exposed_s + agree_s, agree_s, fetch_s, team.parallel.sum_s)
        if first:
            self._progress.warm_up(times, self.samples)
            return
        self._progress.add(times, self.samples, self.exposed_s)
        if self._device.type == "cpu":
            self.watch.demand()
        team.balance(self._number + 1, agreed.computed, self.exposed_s, agreed.demanded)

    def _synchronize(self) -> None:
        finish(self._device)
