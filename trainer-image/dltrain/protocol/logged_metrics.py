"""Send the metrics that a training script logs, such as a validation loss, to the agent at a limited rate."""

import time
import warnings
from collections.abc import Mapping
from typing import Any

from dltrain.protocol.metric_values import MetricChecks, by_step
from dltrain.protocol.rank_messages import Logged
from dltrain.protocol.reporter import RankReporter

INTERVAL_S = 0.25
"""Minimum seconds between two messages. A script may log in every step."""


class LoggedMetrics:
    """Check the metrics of a script and send the last value of each to the agent. Warn once about each invalid one."""

    def __init__(self, reporter: RankReporter) -> None:
        self._reporter = reporter
        self._checks = MetricChecks(_warn)
        self._pending: dict[str, tuple[int, float]] = {}
        """Values that are not sent yet: name → (step, value)."""
        self._sent_at = 0.0

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Log metrics (name → value) that the script measured after ``step`` steps.

        Send them now if the last message is at least ``INTERVAL_S`` seconds old. Otherwise, a later call sends them.
        """
        for name, value in values.items():
            if (found := self._checks.metric(name, value)) is not None:
                self._pending[name] = step, found
        if time.monotonic() - self._sent_at >= INTERVAL_S:
            self.send()

    def send(self) -> None:
        """Send the values that were logged since the last message, if there are any. Each step has its message."""
        if self._pending:
            for step, values in by_step(self._pending).items():
                self._reporter.send(Logged(rank=self._reporter.rank, step=step, values=values))
            self._pending, self._sent_at = {}, time.monotonic()


def _warn(text: str) -> None:
    warnings.warn(f"t.log: {text}", stacklevel=7)
