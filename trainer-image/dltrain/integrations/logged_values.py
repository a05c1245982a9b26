"""Convert the values that a training library logs to arguments of ``dltrain.report``. No import of the library."""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Mapping
from typing import Any

from dltrain.protocol.metric_values import NO_NUMBER, elements
from dltrain.reporting.script_reports import busy

CHECKPOINT_S = 1800.0
"""Seconds without a report that are announced while a library saves a checkpoint."""
EVALUATION_BATCH_S = 600.0
"""Seconds without a report that are announced for each batch of an evaluation and for the work after the last batch."""
BUSY_INTERVAL_S = 1.0
_LOSSES = ("loss", "train_loss", "train/loss")
_ACCURACIES = ("eval_accuracy", "val_accuracy", "val_acc", "eval_acc", "val/accuracy", "eval/accuracy", "accuracy")
_SUMMARIES = re.compile(r"(total_flos|epoch|step|lr-.*/momentum|.*_(runtime|(samples|steps)_per_second))")
"""Names of logged values that are not reported, because they are constant or the job shows them already."""
_INVALID = re.compile(r"[^A-Za-z0-9_./-]")


def report_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the ``values`` that a library logged to the arguments loss, accuracy and metrics of ``dltrain.report``.

    The loss is the first of ``_LOSSES`` among them, and the accuracy the first of ``_ACCURACIES``. Values that are not
    numbers are left out, as are those that the library computes from the progress, such as rates.
    """
    numbers = {
        str(name): value for name, value in values.items() if _is_number(value) and not _SUMMARIES.fullmatch(str(name))
    }
    arguments = {_first(_LOSSES, numbers): "loss", _first(_ACCURACIES, numbers): "accuracy"}
    return {arguments.get(name) or _metric(name): value for name, value in numbers.items()}


def _first(names: Iterable[str], among: Container[str]) -> str:
    return next((name for name in names if name in among), "")


def _metric(name: str) -> str:
    """Turn a logged name into a valid metric name for ``dltrain.report``.

    Replace invalid characters by underscores. Prefix an underscore if the result begins with another character than a
    letter or underscore, or is also a named parameter of ``report``, such as loss.
    """
    name = _INVALID.sub("_", name)
    reserved = name in ("loss", "accuracy", "steps", "samples") or not re.match(r"[A-Za-z_]", name)
    return f"_{name}" if reserved else name


def _is_number(value: Any) -> bool:
    """Return True if ``value`` is a number, or an array or a tensor with one element. Do not read a tensor's value.

    Reading it would wait for the GPU that may still compute it. A bool is not a number.
    """
    if isinstance(value, (bool, str)):
        return False
    if (count := elements(value)) is not None:
        return count == 1
    try:
        float(value)
    except NO_NUMBER:
        return False
    return True


class EvaluationBatches:
    """Tell the job that the script evaluates, so that the missing reports do not count as a hang.

    Call ``announce`` for every batch of an evaluation. It tells the job at most once per second.
    """

    def __init__(self) -> None:
        self._announced_s = float("-inf")

    def announce(self) -> None:
        now_s = time.monotonic()
        if now_s - self._announced_s >= BUSY_INTERVAL_S:
            self._announced_s = now_s
            busy("evaluation", EVALUATION_BATCH_S)
