"""Collect the reports of a script, and make progress updates of them. No I/O, and no clock.

A progress update is a dictionary with the fields of ``protocol.rank_messages.Step``, ``Evaluated`` or ``Logged``. This
module does not import these classes, because they need pydantic, and scripts may lack it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Dict  # noqa: UP035 - Python 3.8 needs it

from dltrain.protocol.metric_values import (
    MAX_METRICS,
    NO_NUMBER,
    MetricChecks,
    by_step,
    element,
    elements,
    is_divided,
    no_silence,
    shown,
    silence_s,
)

Update = Dict[str, Any]  # noqa: UP006 - Python 3.8 needs it

WINDOW = 50
"""Number of last times between two reports from which step times are computed."""
PAUSE = 10.0
"""Minimum ratio of the step time between two reports to the median at which the time contains a pause.

A pause is, for example, an evaluation. The mean step time leaves such times out.
"""
MAX_COUNT, MAX_RATE = 2**53, 1e15
"""Largest count and largest number of samples per second in a job's report. Larger values are reduced to these."""
MAX_EVALUATIONS = 64
"""Maximum number of accuracies that wait for the next progress update. If there are more, the oldest are dropped."""


class StepTimes:
    """Step times in seconds, computed from the times and step numbers of a script's last ``WINDOW`` reports."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)

    def add(self, step: int, now_s: float) -> None:
        """Record a report after ``step`` completed steps at the time ``now_s``, in seconds on a monotonic clock.

        Ignore a second report after the same step. If ``step`` is lower than before, forget all earlier reports.
        """
        if self._seen and step <= self._seen[-1][1]:
            if step < self._seen[-1][1]:
                self._seen.clear()
            else:
                return  # A second report after the same step.
        self._seen.append((now_s, step))

    def typical_s(self) -> float | None:
        """Return the median time of a step in seconds; None before reports of two different steps."""
        return median(seconds / steps for seconds, steps in parts) if (parts := self._parts()) else None

    def mean_s(self) -> float:
        """Return the mean time of a step in seconds, without pauses such as evaluations.

        Return 0 before reports of two different steps.
        """
        if not (typical_s := self.typical_s()):
            return 0.0
        parts = [(seconds, steps) for seconds, steps in self._parts() if seconds / steps <= PAUSE * typical_s]
        return sum(seconds for seconds, _ in parts) / sum(steps for _, steps in parts)

    def interval_s(self) -> float | None:
        """Return the median seconds between two reports, which can be several steps apart; None before two reports."""
        return median(seconds for seconds, _ in parts) if (parts := self._parts()) else None

    def _parts(self) -> list[tuple[float, int]]:
        """Return (seconds between a report and the next one, number of steps between them) for all recorded reports."""
        seen = list(self._seen)
        return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(seen, seen[1:])]  # noqa: B905, RUF007 - newer than Python 3.8


class ReportedProgress:
    """Collect what a script reports, and make progress updates (messages to the agent) of it.

    Adding a report costs microseconds: tensors are converted to numbers only for an update, because the conversion
    waits for a GPU to finish its work.
    """

    def __init__(self, rank: int, world_size: int, samples: int | None, warn: Callable[[str], None]) -> None:
        """Create the progress of one rank. ``samples``: global batch size, unless a report says otherwise.

        ``warn``: called with a text about each value that is not reported.
        """
        self._rank, self._world_size, self._samples, self._warn = rank, world_size, samples, warn
        self._checks = MetricChecks(warn)
        self._warned_fields: set[str] = set()
        self._times = StepTimes()
        self._step = self._highest = -1
        self._steps: int | None = None
        self._epoch: int | None = None
        self._loss_value: float | None = None
        self._loss: Any = None
        self._evaluations: deque[tuple[int, Any]] = deque(maxlen=MAX_EVALUATIONS)
        self._metrics: dict[str, tuple[int, Any]] = {}
        """Metrics that wait for the next progress update: name → (step, last value)."""
        self._changed = False
        self._heeds_stop = False
        """True if the script calls ``dltrain.stop_requested``, so that it stops by itself when the agent asks it."""

    @property
    def step(self) -> int:
        """The step of the last report; -1 before the first one."""
        return self._step

    @property
    def pending(self) -> bool:
        """True if there was a report since the last call of ``updates``."""
        return self._changed

    def heed_stop(self) -> None:
        """Record that the script calls ``dltrain.stop_requested``. The next update tells the agent.

        The agent then need not end the script by a signal.
        """
        if not self._heeds_stop:
            self._heeds_stop = self._changed = True

    def count(self, field: str, value: Any, before: int | None = None) -> int | None:
        """Return ``value``, the argument ``field`` of a report, as an integer from 0 to ``MAX_COUNT``.

        Return ``before`` if it is None, and, after a warning, if it is no finite number.
        """
        if value is None and field != "step":
            return before
        try:
            return max(0, min(int(element(value)), MAX_COUNT))
        except NO_NUMBER:
            effect = "Reports without a step are ignored" if field == "step" else "It is not reported"
            self._warn_once(f"{field}: found {shown(value)}; expected a finite number. {effect}")
            return before

    def silence_s(self, seconds: Any) -> float | None:
        """Return the seconds of a silence that the script announces; None, after a warning, if they are no number."""
        found = silence_s(seconds)
        if found is None:
            self._warn_once(no_silence(seconds))
        return found

    def add(
        self,
        now_s: float,
        step: int,
        steps: int | None,
        loss: Any,
        epoch: float | None,
        accuracy: Any,
        samples: int | None,
        metrics: Mapping[str, Any],
    ) -> None:
        """Add a report of the script. ``now_s``: its time on a monotonic clock.

        The other arguments are those of ``dltrain.report``. A value that is None does not replace an earlier one. A
        number that is invalid counts as None, after a warning. A report with an invalid step is ignored.
        """
        counted = self.count("step", step)
        if counted is None:
            return
        step = counted
        if step < self._highest:
            self._warn_about_step(step)
        else:
            self._highest = step
        self._times.add(step, now_s)
        self._step, self._changed = step, True
        self._steps = self.count("steps", steps, self._steps)
        self._epoch = self.count("epoch", epoch, self._epoch)
        self._samples = self.count("samples", samples, self._samples)
        if loss is not None:
            self._loss = detached(loss)
        if accuracy is not None:
            self._evaluations.append((step, detached(accuracy)))
        for name, value in metrics.items():
            if name in self._metrics or len(self._metrics) < 2 * MAX_METRICS:
                self._metrics[name] = step, detached(value)

    def updates(self, *, tensors: bool) -> list[Update]:
        """Return the progress updates about all reports since the last call, in the order in which they are to be sent.

        Return an empty list if there was no report. ``tensors``: False to leave out values that are tensors; the next
        call with True returns them, also without another report. A thread other than the script's must pass False: it
        must not make a GPU finish its work, because that would end a capture of a CUDA graph.

        Each value is taken before it is read: meanwhile, a signal handler of the script may add a report.
        """
        if self._step < 0:  # The first report may have had no valid step.
            return []
        if not self._changed and not (tensors and self._has_tensors()):
            return []

        def ready(value: Any) -> bool:
            return tensors or not _is_tensor(value)

        self._changed = False
        if self._loss is not None and ready(self._loss):
            loss, self._loss = self._loss, None
            self._loss_value = self._checks.number("loss", loss)
        found: list[Update] = [self._step_update()]
        evaluations, self._evaluations = self._evaluations, deque(maxlen=MAX_EVALUATIONS)
        for step, accuracy in evaluations:
            if not ready(accuracy):
                self._evaluations.append((step, accuracy))
            elif (number := self._checks.number("accuracy", accuracy)) is None:
                continue
            elif 0 <= number <= 1:
                update = {"type": "evaluated", "rank": self._rank, "step": step, "accuracy": number}
                found.append({**update, "loss": self._loss_value})
            else:
                self._warn_about_percentage(number)
                self._metrics["accuracy"] = step, number
        metrics, self._metrics = self._metrics, {}
        numbers: dict[str, tuple[int, float]] = {}
        for name, (step, value) in metrics.items():
            if not ready(value):
                self._metrics.setdefault(name, (step, value))
            elif (metric := self._checks.metric(name, value)) is not None:
                numbers[name] = step, metric
        for step, values in by_step(numbers).items():
            found.append({"type": "logged", "rank": self._rank, "step": step, "values": values})
        return found

    def _has_tensors(self) -> bool:
        """Return True if an earlier call of ``updates`` has left out a tensor that was not replaced since."""
        waiting = (*self._metrics.values(), *self._evaluations)
        return any(map(_is_tensor, (self._loss, *(value for _, value in waiting))))

    def _step_update(self) -> Update:
        step_s = self._times.mean_s()
        return {
            "type": "step",
            "rank": self._rank,
            "step": self._step,
            "steps": self._steps or 0,
            "epoch": self._epoch,
            "loss": self._loss_value,
            "step_s": step_s,
            "typical_s": self._times.typical_s(),
            "samples_per_s": min(MAX_RATE, self._samples / step_s) if self._samples and step_s else 0.0,
            "world_size": self._world_size,
            "reported": True,
            "heeds_stop": self._heeds_stop,
            "interval_s": self._times.interval_s(),
        }

    def _warn_about_step(self, step: int) -> None:
        text = f"step: found {step} after {self._highest}; expected the number of steps since the training began"
        self._warn_once(text)

    def _warn_about_percentage(self, number: float) -> None:
        self._warn_once(
            f"accuracy: found {number:g}; expected 0 to 1. It is shown as a metric without a unit. Divide a percentage "
            "by 100"
        )

    def _warn_once(self, text: str) -> None:
        field = text.partition(":")[0]
        if field not in self._warned_fields:
            self._warned_fields.add(field)
            self._warn(text)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def detached(value: Any) -> Any:
    """Return a copy of an array or a tensor, without a tensor's graph; other values unchanged.

    The graph would keep activations in memory. The script may change the tensor before it is read, such as a sum that
    it sets to zero. The copy does not wait for a GPU. A tensor that is divided among ranks is not copied, because that
    could wait for the other ranks. Neither is one with several elements, because it is not reported.
    """
    with contextlib.suppress(Exception):  # an object of the script that is no tensor
        if is_divided(value):
            return value
        count = elements(value)
        if _is_tensor(value):
            return value.detach() if count not in (None, 1) else value.detach().clone()
        return value.copy() if count == 1 else value
    return value


def line(updates: list[Update]) -> str:
    """Return a line for the log that shows ``updates``, a result of ``ReportedProgress.updates`` that is not empty."""
    step, *others = updates
    parts = [f"dltrain: step {step['step']}" + (f"/{step['steps']}" if step["steps"] else "")]
    if step["epoch"] is not None:
        parts.append(f"epoch {step['epoch']}")
    if step["loss"] is not None:
        parts.append(f"loss {step['loss']:.4f}")
    text = " ".join(parts)
    shown = []
    if step["step_s"]:
        shown.append(f"{1e3 * step['step_s']:.1f} ms/step")
    if step["samples_per_s"]:
        shown.append(f"{step['samples_per_s']:.0f} samples/s")
    for update in others:
        at = "" if update["step"] == step["step"] else f" at step {update['step']}"
        if update["type"] == "evaluated":
            shown.append(f"accuracy {update['accuracy']:.4f}{at}")
        else:
            shown += [f"{name} {value:.6g}{at}" for name, value in update["values"].items()]
    return ", ".join([text, *shown])
