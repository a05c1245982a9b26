"""Decide when a training is good enough to stop before its last step (``spec.until``). No I/O, and no clock."""

from collections import deque
from collections.abc import Iterable

from dlcontract import StoppedEarly, TargetProgress, Until, reasons
from dltrain.protocol.rank_messages import Evaluated, Logged, RankMessage, Step
from dltrain.record.target_forecast import forecast

CAPACITY = 4096
"""Maximum number of stored values of the metric, which is more than the largest patience (``spec.until.patience``)."""


def value_of(message: RankMessage, metric: str) -> tuple[int, float] | None:
    """Return (step, value) of ``metric`` in a rank's message, or None if the message has no value of it.

    ``metric``: accuracy, loss, or the name of a metric that the script logs.
    """
    match message:
        case Evaluated() if metric == "accuracy":
            return message.step, message.accuracy
        case Step() if metric == "loss" and message.loss is not None:
            return message.step, message.loss
        case Logged() if metric in message.values:
            return message.step, message.values[metric]
    return None


class StoppingRule:
    """The values of the metric in ``spec.until`` so far, and the decision if the training stops because of them."""

    def __init__(self, until: Until, values: Iterable[tuple[int, float]] = ()) -> None:
        """Create the rule that ``until`` describes. ``values``: (step, value) of earlier attempts, from the run report.

        An attempt is a launch of all ranks.
        """
        self.until = until
        self._values: deque[tuple[int, float]] = deque(values, maxlen=CAPACITY)
        self._progress: tuple[int, TargetProgress] | None = None
        """The last result of ``progress``, and the number of values that had been recorded when it was computed."""
        self._recorded = 0

    def continued(self, until: Until) -> "StoppingRule | None":
        """Return the rule for ``until`` after a change of the plan; None if ``until`` has another metric.

        It has all values so far. The run report has only some of many, with which ``until.patience`` would begin anew.
        """
        return StoppingRule(until, self._values) if until.metric == self.until.metric else None

    @property
    def values(self) -> tuple[tuple[int, float], ...]:
        """The recorded values of the metric, as (step, value) in the order of the steps."""
        return tuple(self._values)

    def progress(self) -> TargetProgress | None:
        """Return the last value and the best value of the metric, and the forecast of the step that reaches the target.

        Return None before the first value. The forecast is None if it is not possible.
        """
        if not self._values:
            return None
        if self._progress is None or self._progress[0] != self._recorded:
            value, best = self._values[-1][1], self._values[self._best()][1]
            found = TargetProgress(value=value, best=best, forecast=forecast(self.values, self.until))
            self._progress = self._recorded, found
        return self._progress[1]

    def _best(self) -> int:
        """Return the index of the best value in ``_values``; of several equal ones, the first."""
        best = 0
        for index, (_, value) in enumerate(self._values):
            if self.until.better(value, self._values[best][1]):
                best = index
        return best

    def record(self, message: RankMessage) -> tuple[int, StoppedEarly] | None:
        """Record a message of the rank that represents the job. Return a result if the training should stop.

        The result is (step, why the training stops after this step): the metric has reached its target, or has not
        improved for as many values as ``until.patience``. Otherwise return None. A value at an earlier step than the
        last one replaces the later values, because a restart repeats these steps.
        """
        if (found := value_of(message, self.until.metric)) is None:
            return None
        if isinstance(message, Step) and self._values and self._values[-1][1] == found[1]:
            return None  # A script reports its last loss until it has another one.
        step = found[0]
        while self._values and self._values[-1][0] >= step:
            self._values.pop()
        self._values.append(found)
        self._recorded += 1
        if (why := self._why()) is None:
            return None
        return step, why

    def _why(self) -> StoppedEarly | None:
        until, (step, value) = self.until, self._values[-1]
        shown = f"{until.metric}: found {value:.6g} after step {step}"
        if until.reached(value):
            field, limit = ("atLeast", until.at_least) if until.at_least is not None else ("atMost", until.at_most)
            message = f"{shown}; spec.until.{field} is {limit:g}"
            return StoppedEarly(reason=reasons.TARGET_REACHED, message=message)
        best = self._best()
        without = len(self._values) - 1 - best
        if until.patience is None or without < until.patience:
            return None
        best_step, best_value = self._values[best]
        message = f"{shown}, which is no better than {best_value:.6g} after step {best_step}; spec.until.patience is "
        return StoppedEarly(reason=reasons.NO_IMPROVEMENT, message=f"{message}{until.patience}")
