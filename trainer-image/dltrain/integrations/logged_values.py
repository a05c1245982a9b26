"""Sort the values that a training library logs into the arguments of ``dltrain.report``. Without the library."""

import re
import time
from collections.abc import Mapping
from typing import Any

from dltrain.reporting.script_reports import busy

CHECKPOINT_S = 1800.0
"""Seconds that a library may take to save a checkpoint, during which it makes no report."""
EVALUATION_BATCH_S = 600.0
"""Seconds that one batch of an evaluation may take, and the work after the last one."""
BUSY_INTERVAL_S = 1.0
_LOSSES = ("loss", "train_loss", "train/loss")
_ACCURACIES = ("eval_accuracy", "val_accuracy", "val_acc", "eval_acc", "val/accuracy", "eval/accuracy", "accuracy")
_SUMMARIES = re.compile(r"(total_flos|epoch|step|lr-.*/momentum|.*_(runtime|(samples|steps)_per_second))")
"""Names that do not change over a run, or that the job shows already."""
_INVALID = re.compile(r"[^A-Za-z0-9_./-]")


def report_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments loss, accuracy and metrics of ``dltrain.report`` for the ``values`` that a library logged.

    Values that are not numbers are left out, as are those that the library computes from the progress.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if _SUMMARIES.fullmatch(name) or not _is_number(value):
            continue
        if name in _LOSSES and "loss" not in found:
            found["loss"] = value
        elif name in _ACCURACIES and "accuracy" not in found:
            found["accuracy"] = value
        else:
            found[_metric(name)] = value
    return found


def _metric(name: str) -> str:
    """Return a valid name for a metric of ``dltrain.report`` that is none of its other arguments."""
    name = _INVALID.sub("_", name)
    reserved = name in ("loss", "accuracy", "steps", "samples") or not re.match(r"[A-Za-z_]", name)
    return f"_{name}" if reserved else name


def _is_number(value: Any) -> bool:
    """Return True if ``value`` is a number, or a tensor with one element, whose value a GPU may still compute."""
    if isinstance(value, bool | str):
        return False
    if hasattr(value, "detach"):
        return bool(value.numel() == 1)
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


class EvaluationBatches:
    """Announce that an evaluation goes on, at most once per second."""

    def __init__(self) -> None:
        self._announced_s = float("-inf")

    def announce(self) -> None:
        now_s = time.monotonic()
        if now_s - self._announced_s >= BUSY_INTERVAL_S:
            self._announced_s = now_s
            busy("evaluation", EVALUATION_BATCH_S)
