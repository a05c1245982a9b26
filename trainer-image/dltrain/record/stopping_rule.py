"""Decide when a training is good enough to stop before its last step (``spec.until``). No I/O, and no clock."""

from collections import deque
from collections.abc import Iterable
from math import inf

from dlcontract import PatienceState, StoppedEarly, TargetProgress, Until, reasons
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

    def __init__(
        self, until: Until, values: Iterable[tuple[int, float]] = (), before: TargetProgress | None = None
    ) -> None:
        """Create the rule that ``until`` describes. ``values``: (step, value) of earlier attempts, from the run report.

        An attempt is a launch of all ranks. ``before``: the progress that an earlier coordinator has reported last.
        Unlike ``values``, which may lack some, it has the exact best value and number of values since then. It is
        ignored if it is of another metric.
        """
        self.until = until
        self._values: deque[tuple[int, float]] = deque(values, maxlen=CAPACITY)
        counted = before.patience if before is not None else None
        of_same = counted is not None and (counted.metric, counted.larger_is_better) == (until.metric, self._larger)
        self._before = before if of_same else None
        self._first_step: float = inf
        """Lowest step of a value that was recorded here. The values from it on are complete."""
        self._progress: tuple[int, TargetProgress] | None = None
        """The last result of ``progress``, and the number of values that had been recorded when it was computed."""
        self._recorded = 0

    def continued(self, until: Until) -> "StoppingRule | None":
        """Return the rule for ``until`` after a change of the plan; None if ``until`` has another metric.

        It has all values so far. The run report has only some of many, with which ``until.patience`` would begin anew.
        """
        if until.metric != self.until.metric:
            return None
        rule = StoppingRule(until, self._values, self._before)
        rule._first_step = self._first_step
        return rule

    @property
    def _larger(self) -> bool:
        return self.until.at_least is not None

    @property
    def values(self) -> tuple[tuple[int, float], ...]:
        """The recorded values of the metric, as (step, value) in the order of the steps."""
        return tuple(self._values)

    def progress(self) -> TargetProgress | None:
        """Return the last value and the best value of the metric, and the forecast of the step that reaches the target.

        Return None before the first value. The forecast is None if it is not possible.
        """
        if not self._values or (self._first_step == inf and self._before is not None):
            return self._before
        if self._progress is None or self._progress[0] != self._recorded:
            best_step, best, since = self._best()
            counted, last_step = self._counted(), self._values[-1][0]
            if counted is not None and counted.best_step == best_step:
                last_step = max(last_step, counted.last_step)  # steps up to there may be repeated at the moment
            patience = PatienceState(
                metric=self.until.metric,
                larger_is_better=self._larger,
                best_step=best_step,
                last_step=last_step,
                values_since_best=since,
            )
            ahead = forecast(self.values, self.until)
            found = TargetProgress(value=self._values[-1][1], best=best, patience=patience, forecast=ahead)
            self._progress = self._recorded, found
        return self._progress[1]

    def _counted(self) -> PatienceState | None:
        """Return the count of an earlier coordinator; None if there is none, or if its best step was repeated since."""
        counted = self._before.patience if self._before is not None else None
        return counted if counted is not None and counted.best_step < self._first_step else None

    def _best(self) -> tuple[int, float, int]:
        """Return (step, value, number of later values) of the best value; of several equal ones, of the first.

        There is a value. Values that repeat steps which an earlier coordinator has counted do not count again.
        """
        counted, values = self._counted(), list(self._values)
        if counted is not None and self._before is not None:
            values = [found for found in values if found[0] >= self._first_step]
            if not any(self.until.better(value, self._before.best) for _, value in values):
                new = sum(step > counted.last_step for step, _ in values)
                return counted.best_step, self._before.best, counted.values_since_best + new
        best = 0
        for index, (_, value) in enumerate(values):
            if self.until.better(value, values[best][1]):
                best = index
        return *values[best], len(values) - 1 - best

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
        self._first_step = min(self._first_step, step)
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
        best_step, best_value, since = self._best()
        if until.patience is None or since < until.patience:
            return None
        message = f"{shown}, which is no better than {best_value:.6g} after step {best_step}; spec.until.patience is "
        return StoppedEarly(reason=reasons.NO_IMPROVEMENT, message=f"{message}{until.patience}")
