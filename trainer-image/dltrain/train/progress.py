"""Progress updates: messages of a rank to its agent with step, times and loss, at most a few per second."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite, nan
from typing import Any

from dlcontract import Noise, Outcome
from dltrain.analysis.result import Analysis
from dltrain.device.energy import Meter
from dltrain.optim.grad_scaler import LossScale
from dltrain.optim.noise_scale import NoiseScale
from dltrain.protocol.logged_metrics import LoggedMetrics
from dltrain.protocol.metric_values import NO_NUMBER, element, no_silence, silence_s
from dltrain.protocol.rank_messages import Analyzed, Busy, Energy, Evaluated, Step
from dltrain.protocol.reporter import RankReporter
from dltrain.timing.step_times import Times, Window

UPDATE_INTERVAL_S = 0.25
EVALUATION_BATCH_S = 300.0
"""Seconds without a progress update that are announced for one batch of held-out data.

They also cover the work of the script after the last batch.
"""
END_OF_EPOCH_S = 60.0
"""Seconds without a progress update that are announced at the end of an epoch, for example for an evaluation.

If the epoch took longer, its duration is announced instead.
"""


class Progress:
    """Collect times and losses of one rank, and send them to its agent as progress updates.

    The agent treats a long silence as a hang.
    """

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
        self._metrics, self._warned = LoggedMetrics(reporter), False
        self.accuracy: float | None = None
        self.loss: float | None = None
        """Mean loss over the steps between the last two progress updates."""
        self.times = Times(0.0, 0.0, 0.0)
        """Times of the last step."""
        self.gradient_nbytes = 0
        """Bytes of gradients that ranks reduce in each step."""
        self.gpu_memory_nbytes: Callable[[], int | None] = lambda: None
        """Function that returns the peak memory of tensors on the GPU in bytes, or None if unknown."""
        self.bound_ranks: int | None = None
        """The only number of ranks with which the training can continue; None: any number."""
        self._window = Window()
        self._cold = False
        self._losses: list[float] = []
        self._sent_at = 0.0
        self._epoch_began = time.monotonic()
        self._paused = True
        self._stale: list[float] = []
        self._ahead: float | None = None
        self._last: Step | None = None
        self._counted: tuple[float, float] | None = None
        """(time in seconds, joules) of the last update; None while the script may pause."""
        self._power_W: float | None = None
        """Last measured mean power between two updates; None if none was measured."""

    def due(self, last: bool) -> bool:
        """Return True if this rank should send a progress update after this step. ``last``: True for the last step.

        Updates are due after the first step, the last step, the first step of an epoch, and every ``UPDATE_INTERVAL_S``
        seconds.
        """
        return self._paused or last or time.monotonic() - self._sent_at >= UPDATE_INTERVAL_S

    def add_loss(self, loss: float) -> None:
        """Add the mean loss of a step's batch, over all ranks. The next update reports the mean of the added losses."""
        self._losses.append(loss)

    def warm_up(self, times: Times, samples: int, share: int) -> None:
        """Record the first step of this process. ``samples``, ``share``: see ``add``.

        This step allocates and compiles. Averages therefore omit it as soon as there is a second step.
        """
        self.reporter.mark("first_step")
        self.times = times
        self._window.add(times, samples, share)
        self._cold = True

    def add(self, times: Times, samples: int, share: int, exposed_before: Sequence[float]) -> None:
        """Record a step.

        ``samples``: size of the step's batch, over all ranks. ``share``: local batch size of this rank.
        ``exposed_before``: seconds in which communication of each worker did not overlap with computing, in the
        previous step.
        """
        if self._cold:
            self._window, self._cold = Window(), False
        self.times = times
        self._window.add(times, samples, share)
        if exposed_before:
            self._window.add_exposed(exposed_before)

    def asynchronous(self, staleness: float, ahead: float) -> None:
        """Record, for the next progress update, how stale the parameters of this worker's last update were.

        ``staleness``: number of updates by other workers since this worker got the parameters. ``ahead``: number of
        steps by which this worker is ahead of the slowest worker.
        """
        self._stale.append(staleness)
        self._ahead = ahead

    def alive(self) -> None:
        """Repeat the last progress update while this rank waits, so that the agent does not treat it as hung."""
        if self._last is not None:
            self.reporter.send(self._last)

    def report_step(
        self, step: int, steps: int, epoch: int, rate: float, norm: float | None, share: int, world_size: int
    ) -> None:
        """Send a progress update after ``step`` of ``steps`` steps to the agent.

        ``rate``: learning rate. ``norm``: gradient norm; None: unknown. ``share``: this rank's local batch size.
        ``world_size``: number of ranks that train.
        """
        if self._losses:
            self.loss = sum(self._losses) / len(self._losses)
            self._losses = []
        self._sent_at = time.monotonic()
        self._paused = False
        energy = self._energy(self._sent_at)
        measure = self._window.measure(self.rank, self.device_name, share).model_copy(update={"power_W": self._power_W})
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
            measure=measure,
            gradient_nbytes=self.gradient_nbytes,
            staleness=sum(self._stale) / len(self._stale) if self._stale else None,
            ahead=self._ahead,
            noise=None if (samples := self._noise.samples) is None else Noise(samples=samples, steps=self._noise.steps),
            loss_scale=scale,
            skipped_updates=None if scale is None else self._loss_scale.skipped,
            energy=energy,
            gpu_memory_nbytes=self.gpu_memory_nbytes(),
            bound_ranks=self.bound_ranks,
        )
        self._stale = []
        self.reporter.send(self._last)
        self._metrics.send()

    def _energy(self, now_s: float) -> Energy | None:
        """Return the energy used so far, and update the mean power. ``now_s``: present time on the monotonic clock."""
        found = self._meter.used() if self._meter else None
        if found is None:
            self._counted = self._power_W = None
            return None
        if self._counted is not None and now_s - self._counted[0] >= UPDATE_INTERVAL_S:
            self._power_W = (found.joules - self._counted[1]) / (now_s - self._counted[0])
        if self._counted is None or now_s - self._counted[0] >= UPDATE_INTERVAL_S:
            self._counted = now_s, found.joules
        return found

    def log(self, step: int, accuracy: Any, metrics: Mapping[str, Any]) -> None:
        """Report an accuracy and further metrics of the script to the agent, as those after ``step`` completed steps.

        ``accuracy`` None: report only the metrics. An accuracy outside of 0 to 1, such as a percentage, is reported as
        a metric with the name ``accuracy``.
        """
        if accuracy is not None:
            try:
                found = float(element(accuracy))
            except NO_NUMBER:
                found = nan
            if 0 <= found <= 1:
                self.accuracy = found
                self.reporter.send(Evaluated(rank=self.rank, step=step, accuracy=found, loss=self.loss))
            else:
                if isfinite(found) and not self._warned:
                    self._warned = True
                    text = f"t.log: accuracy: found {found:g}; expected 0 to 1. It is shown as a metric without a unit"
                    warnings.warn(f"{text}. Divide a percentage by 100", stacklevel=3)
                metrics = {**metrics, "accuracy": accuracy}
        self._metrics.add(step, metrics)

    def analyzed(self, step: int, analysis: Analysis) -> None:
        """Report an analysis of all ranks' predictions on held-out data, as that after ``step`` completed steps."""
        self.reporter.send(Analyzed(rank=self.rank, step=step, analysis=analysis))

    def outcome(self, steps: int, seconds: float, checkpoint: str | None) -> Outcome:
        """Return the result of a run that has ended, with its last loss and accuracy.

        ``steps``: number of completed steps. ``seconds``: duration of the run. ``checkpoint``: path of the last
        checkpoint; None: there is none.
        """
        self._metrics.send()
        return Outcome(steps=steps, seconds=seconds, loss=self.loss, accuracy=self.accuracy, checkpoint=checkpoint)

    def end_epoch(self) -> None:
        """Announce to the agent that the script may pause between epochs. The next progress update ends the pause."""
        now = time.monotonic()
        self.busy("end of an epoch", max(END_OF_EPOCH_S, now - self._epoch_began))
        self._epoch_began = now
        self._paused = True
        self._counted = None  # The power of a pause is not that of training.

    def busy(self, what: str, limit_s: float) -> None:
        """Announce to the agent that no progress update may come for up to ``limit_s`` seconds, because of ``what``.

        Only warn if ``limit_s`` is no number.
        """
        if (silence := silence_s(limit_s)) is None:
            warnings.warn(f"t.{no_silence(limit_s)}", stacklevel=3)
        else:
            self.reporter.send(Busy(rank=self.rank, what=str(what), limit_s=silence))

    def evaluating(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches`` of held-out data, and announce to the agent that the script evaluates.

        Otherwise, the agent could treat the silence as a hang. Announce it at most every ``UPDATE_INTERVAL_S`` seconds.
        """
        told_at = -inf
        for batch in batches:
            if time.monotonic() - told_at >= UPDATE_INTERVAL_S:
                self.busy("evaluation", EVALUATION_BATCH_S)
                told_at = time.monotonic()
            yield batch
