"""Check the names, the number and the values of the metrics that a training script logs.

This module needs the standard library of Python 3.8 only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite, isnan
from typing import Any, TypeVar

MAX_METRICS, MAX_METRIC_NAME = 16, 48
"""Maximum number of different metrics of a script, and maximum length of a metric's name in characters. These are
copies of the bounds in ``dlcontract``, because importing that package would need pydantic. A test compares both."""
LARGEST = 1e300
MIN_SILENCE_S, MAX_SILENCE_S = 1e-3, 86_400.0
"""Bounds in seconds of the silence that a script may announce (``rank_messages.Busy``)."""
NO_NUMBER = (Exception,)
"""Exceptions of ``float`` and ``int`` for values of a script that are no number, or too large. The method ``__float__``
of an object may raise any."""
V = TypeVar("V")
_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_./-]{{0,{MAX_METRIC_NAME - 1}}}")


class MetricChecks:
    """Check names and values of a script's metrics.

    ``warn``: called with a text for each invalid metric, but only once for each name.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn_about = warn
        self._names: set[str] = set()
        self._warned: set[str] = set()

    def metric(self, name: str, value: Any) -> float | None:
        """Return the value of the metric ``name`` as a finite number, or None if the metric is not accepted.

        It is not accepted if its name or value is invalid, or if there are ``MAX_METRICS`` other metrics already.
        """
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
        number = self.number(name, value)
        if number is not None:
            self._names.add(name)
        return number

    def number(self, name: str, value: Any) -> float | None:
        """Return ``value`` as a number, or None if it is no number, not finite, or beyond ±``LARGEST``.

        ``name``: the metric's name, for the warning if the result is None.
        """
        if is_divided(value):
            return self._warn(
                name,
                f"{name}: found a {type(value).__name__} that is divided among ranks; expected a number. It is not "
                "reported. Pass value.full_tensor(), which every rank must call",
            )
        if (count := elements(value)) not in (None, 1):
            return self._warn(
                name,
                f"{name}: found a {type(value).__name__} with {count} elements; expected one number. It is not "
                "reported. Pass its mean or one of its elements",
            )
        try:
            number = float(element(value))
        except NO_NUMBER:
            return self._warn(name, f"{name}: found {type(value).__name__}; expected a number. It is not reported")
        if not isfinite(number) or abs(number) > LARGEST:
            return self._warn(name, f"{name}: found {number}; expected a finite number. Such values are not reported")
        return number

    def _warn(self, name: str, text: str) -> float | None:
        """Warn once about the metric ``name``. Return None in place of its value."""
        if name not in self._warned and len(self._warned) <= MAX_METRICS:
            self._warned.add(name)
            self._warn_about(text)
        return None


def elements(value: Any) -> int | None:
    """Return the number of elements of an array or a tensor; None for any other object. Do not read the elements."""
    try:
        if not callable(value.item):
            return None
        size = value.numel() if hasattr(value, "numel") else value.size
        return int(size)
    except NO_NUMBER:
        return None


def element(value: Any) -> Any:
    """Return the element of an array or a tensor that has exactly one, such as ``numpy.array([0.5])``.

    Return any other object as it is. This function waits for a GPU that still computes the element.
    """
    return value.item() if elements(value) == 1 else value


def by_step(values: Mapping[str, tuple[int, V]]) -> dict[int, dict[str, V]]:
    """Sort ``values`` (name → step, value) by their steps, the lowest first. Return step → name → value."""
    found: dict[int, dict[str, V]] = {}
    for name, (step, value) in sorted(values.items(), key=lambda item: item[1][0]):
        found.setdefault(step, {})[name] = value
    return found


def merged(before: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """Return the last value of each metric. Of more than ``MAX_METRICS`` metrics, those that came first stay."""
    return dict(list({**before, **new}.items())[:MAX_METRICS])


def is_divided(value: Any) -> bool:
    """Return True for a tensor of which each rank has a part or a summand, such as the norm of a sharded parameter.

    ``float`` returns that of this rank, and other functions wait for all ranks.
    """
    placements = getattr(value, "placements", None)
    try:
        return any(not each.is_replicate() for each in placements or ())
    except (AttributeError, TypeError):
        return False  # an object of the script, not a DTensor


def silence_s(seconds: Any) -> float | None:
    """Return the ``seconds`` of a silence that a script announces, within the bounds that the agent accepts.

    Infinity is the longest silence. Return None if they are no number.
    """
    try:
        found = float(element(seconds))
    except NO_NUMBER:
        return None
    return None if isnan(found) else min(max(found, MIN_SILENCE_S), MAX_SILENCE_S)


def no_silence(seconds: Any) -> str:
    """Return the warning about ``seconds`` for which ``silence_s`` has returned None."""
    return f"busy: found {shown(seconds)} seconds; expected a number. The silence is not announced"


def shown(value: Any) -> str:
    """Return an invalid value as it is shown in a warning: a short text or a number, and otherwise its type."""
    return f"{value!r:.40}" if isinstance(value, (str, float)) else type(value).__name__
