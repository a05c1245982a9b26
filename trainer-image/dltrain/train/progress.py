"""How the run is going, and when to say so: at most a few times a second."""

import time
from collections.abc import Callable, Sequence

from dlcontract import Noise
from dltrain.device.energy import Meter
from dltrain.optim.grad_scaler import LossScale
from dltrain.optim.noise_scale import NoiseScale
from dltrain.protocol.rank_messages import Busy, Evaluated, Step
from dltrain.protocol.reporter import RankReporter
from dltrain.timing.step_times import Times, Window

NEWS_INTERVAL_S = 0.25
END_OF_EPOCH_S = 60.0
"""How long a script may be silent after an epoch, for its evaluation, and at least as long as the epoch took."""


class Progress:
    """One rank's times, losses and news of them. To the agent, silence between news means that the rank hangs."""

    def __init__(
        self,
        reporter: RankReporter,
        rank: int,
        device_name: str,
        noise: NoiseScale,
        loss_scale: LossScale,
        meter: Meter | None = None,
    ) -> None:
        self.reporter, self.rank, self.device_name, self._noise = reporter, rank, device_name, noise
        self._loss_scale, self._meter = loss_scale, meter
        self.accuracy: float | None = None
        self.loss: float | None = None
        """Mean over the steps between the last two news."""
        self.times = Times(0.0, 0.0, 0.0)
        """Of the last step."""
        self.gradient_nbytes = 0
        """Summed over ranks in each step."""
        self.gpu_memory_nbytes: Callable[[], int | None] = lambda: None
        """The most that tensors took of a GPU's."""
        self._window = Window()
        self._cold = False
        self._losses: list[float] = []
        self._told_at = 0.0
        self._epoch_began = time.monotonic()
        self._paused = True
        self._stale: list[float] = []
        self._ahead: float | None = None
        self._last: Step | None = None

    def due(self, last: bool) -> bool:
        """Whether the step under way is to be told: the first, the ``last``, the first of an epoch, or it is time."""
        return self._paused or last or time.monotonic() - self._told_at >= NEWS_INTERVAL_S

    def add_loss(self, loss: float) -> None:
        """Mean loss of a step's batch."""
        self._losses.append(loss)

    def warm_up(self, times: Times, samples: int) -> None:
        """The first step: it allocates and compiles, so it counts only as long as there is no other."""
        self.reporter.mark("first_step")
        self.times = times
        self._window.add(times, samples)
        self._cold = True

    def add(self, times: Times, samples: int, exposed_before: Sequence[float]) -> None:
        """A step of ``samples`` over all ranks; ``exposed_before``: of every computing rank, in the step before."""
        if self._cold:
            self._window, self._cold = Window(), False
        self.times = times
        self._window.add(times, samples)
        if exposed_before:
            self._window.add_exposed(exposed_before)

    def asynchronous(self, staleness: float, ahead: float) -> None:
        """Without lockstep: the staleness of an update, and how many steps the worker is ahead of the slowest."""
        self._stale.append(staleness)
        self._ahead = ahead

    def alive(self) -> None:
        """Nothing new, but the rank does not hang: it waits for others."""
        if self._last is not None:
            self.reporter.send(self._last)

    def tell(
        self, step: int, steps: int, epoch: int, rate: float, norm: float | None, share: int, world_size: int
    ) -> None:
        """News of a step: ``step`` of ``steps`` done, learning rate, gradient norm, this rank's share."""
        if self._losses:
            self.loss = sum(self._losses) / len(self._losses)
            self._losses = []
        self._told_at = time.monotonic()
        self._paused = False
        scale = self._loss_scale.scale
        self._last = Step(
            rank=self.rank,
            step=step,
            steps=steps,
            epoch=epoch,
            loss=self.loss,
            learning_rate=rate,
            gradient_norm=norm,
            step_s=self._window.step_s,
            samples_per_s=self._window.samples_per_s,
            world_size=world_size,
            typical_s=self._window.typical_s,
            measure=self._window.measure(self.rank, self.device_name, share),
            gradient_nbytes=self.gradient_nbytes,
            staleness=sum(self._stale) / len(self._stale) if self._stale else None,
            ahead=self._ahead,
            noise=None if (samples := self._noise.samples) is None else Noise(samples=samples, steps=self._noise.steps),
            loss_scale=scale,
            skipped_updates=None if scale is None else self._loss_scale.skipped,
            energy=self._meter.used() if self._meter else None,
            gpu_memory_nbytes=self.gpu_memory_nbytes(),
        )
        self._stale = []
        self.reporter.send(self._last)

    def tell_accuracy(self, step: int, accuracy: float) -> None:
        self.accuracy = accuracy
        self.reporter.send(Evaluated(rank=self.rank, step=step, accuracy=accuracy, loss=self.loss))

    def end_epoch(self) -> None:
        """What the script does between epochs may take its time; the next step says that all is well again."""
        now = time.monotonic()
        self.busy("end of an epoch", max(END_OF_EPOCH_S, now - self._epoch_began))
        self._epoch_began = now
        self._paused = True

    def busy(self, what: str, limit_s: float) -> None:
        """Say that there may be no news for ``limit_s``."""
        self.reporter.send(Busy(rank=self.rank, what=what, limit_s=min(limit_s, 86_400)))
