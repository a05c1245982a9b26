"""The metrics that a training script logs: any names and numbers, within bounds."""

import re
import time
import warnings
from collections.abc import Mapping
from math import isfinite
from typing import Any

from dlcontract import MAX_METRIC_NAME, MAX_METRICS
from dltrain.protocol.rank_messages import Logged
from dltrain.protocol.reporter import RankReporter

_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_./-]{{0,{MAX_METRIC_NAME - 1}}}")
LARGEST = 1e300
INTERVAL_S = 0.25
"""Minimum seconds between two messages. A script may log in every step."""


class LoggedMetrics:
    """Check the metrics of a script and send the last value of each to the agent. Warn once about each invalid one."""

    def __init__(self, reporter: RankReporter) -> None:
        self._reporter = reporter
        self._names: set[str] = set()
        self._warned: set[str] = set()
        self._pending: dict[str, float] = {}
        self._step = 0
        self._sent_at = 0.0

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Log ``values`` after ``step`` steps."""
        for name, value in values.items():
            if (found := self._number(name, value)) is not None:
                self._pending[name], self._step = found, step
        if time.monotonic() - self._sent_at >= INTERVAL_S:
            self.send()

    def send(self) -> None:
        """Send the values that were logged since the last message, if there are any."""
        if self._pending:
            self._reporter.send(Logged(rank=self._reporter.rank, step=self._step, values=self._pending))
            self._pending, self._sent_at = {}, time.monotonic()

    def _number(self, name: str, value: Any) -> float | None:
        if _NAME.fullmatch(name) is None:
            return self._warn(
                name,
                f"found the name {name[:80]!r}; expected a letter, then at most {MAX_METRIC_NAME - 1} letters, digits "
                "and characters of _./-. Rename the metric",
            )
        if name not in self._names and len(self._names) >= MAX_METRICS:
            return self._warn(
                name, f"found more than {MAX_METRICS} metrics; expected at most {MAX_METRICS}. {name} is not reported"
            )
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            return self._warn(name, f"{name}: found {type(value).__name__}; expected a number. It is not reported")
        if not isfinite(number) or abs(number) > LARGEST:
            return self._warn(name, f"{name}: found {number}; expected a finite number. Such values are not reported")
        self._names.add(name)
        return number

    def _warn(self, name: str, text: str) -> float | None:
        """Warn once about the metric ``name``. Return None in place of the metric's value."""
        if name not in self._warned and len(self._warned) <= MAX_METRICS:
            self._warned.add(name)
            warnings.warn(f"t.log: {text}", stacklevel=5)
        return None
