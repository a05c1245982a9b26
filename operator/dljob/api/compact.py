"""Store decoded JSON in less memory. The module does no I/O.

As Python objects, the status of a job of 4 pods takes 9 KiB, and the texts of its plan 3.5 KiB. Compressed, they take
2.5 KiB together, and 0.3 KiB with the text of a similar job as the dictionary of the compression. They are read when
the job is reconciled. What the loops over all jobs read is stored beside the compressed text.
"""

import json
import zlib
from collections.abc import Hashable, ItemsView, Iterator, Mapping
from functools import lru_cache
from math import isfinite, isnan, nan
from struct import Struct
from typing import Any, NamedTuple, TypeVar, cast

MAX_SHARED = 128
"""Maximum length of a string that is shared with equal ones. Longer ones are mostly messages, which differ."""
MAX_STRINGS = 2**14
"""Maximum number of known strings. ``sys.intern`` has no such limit, and Python 3.12 never frees its strings.

Most strings are times and messages, which soon exist nowhere else. Those that are shared come again after a clearing.
"""
MAX_SECTION, MAX_SECTIONS = 2**10, 2**11
"""Maximum length of the JSON text of a section that is shared, and maximum number of known ones."""
MAX_SECTION_PARTS = 32
"""Maximum number of maps and lists of such a section. Of empty lists alone, 1 KiB of text would take 35 KiB in memory.

Known sections outlast their jobs: whoever edits one job again and again could fill memory that no limit counts.
"""
MAX_BRIEF = 64
"""Maximum number of conditions that are read without decompressing the status. The operator writes fewer."""
MAX_DEPTH = 16
"""Levels of nesting below which values stay as they are."""
MAX_DICTIONARY = 2**13
"""Maximum bytes of a text that serves as the dictionary of the compression."""
DICTIONARY_USES = 2**14
"""Number of texts that are compressed with one dictionary. Each text holds its dictionary in memory."""
MAX_UNPACKED = 32
"""Number of packed values that stay decoded: a reconcile reads the same status several times."""
_KNOWN: dict[str, str] = {}
_SECTIONS: dict[str, Any] = {}
T = TypeVar("T", bound=Hashable)
Default = TypeVar("Default", float, None)


def compact(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Return an equal value whose short strings are shared with all other values of this function.

    Each object that the JSON decoder returns has strings of its own, also for the names of its fields. In the spec and
    status of a typical job, these take half of the memory. ``levels``: levels of nesting to look at.
    """
    if isinstance(value, str):
        if len(value) > MAX_SHARED:
            return value
        if len(_KNOWN) >= MAX_STRINGS:
            _KNOWN.clear()
        return _KNOWN.setdefault(value, value)
    if not levels:
        return value
    if isinstance(value, dict):
        return {compact(name, 0): compact(item, levels - 1) for name, item in value.items()}
    if isinstance(value, list):
        return [compact(item, levels - 1) for item in value]
    return value


def shared(value: T) -> T:
    """Return an equal value from an earlier call if there is one, and otherwise the given one, to save memory.

    Most nodes have the same conditions, all pods of a StatefulSet the same charge, and most volumes the same zone.
    """
    return cast(T, _shared(value))


@lru_cache(maxsize=4096, typed=True)
def _shared(value: Hashable) -> Hashable:
    return value


def shared_sections(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equal map whose short maps and lists are shared with all other values of this function.

    Few jobs have equal specs, but many have an equal section ``checkpoint`` or ``dataset``. ``value``: JSON with a
    limited depth. Nobody may change the result.
    """
    return {compact(name): _section(item) for name, item in value.items()}


def _section(value: Any) -> Any:
    if not isinstance(value, dict | list):
        return compact(value)
    text = json.dumps(value)
    if len(text) > MAX_SECTION or text.count("[") + text.count("{") > MAX_SECTION_PARTS:
        return compact(value)
    if len(_SECTIONS) >= MAX_SECTIONS:
        _SECTIONS.clear()
    found = _SECTIONS.get(text)
    if found is None:
        found = _SECTIONS[text] = compact(value)
    return found


ABSENT = ("", "")
"""Status and reason of a condition that a job's status lacks."""


class _Packing:
    """Compresses texts of one kind. Those of two jobs have much in common, so an earlier one is the dictionary."""

    def __init__(self) -> None:
        self._dictionary, self._uses = b"", 0

    def packed(self, value: Any) -> tuple[bytes, bytes]:
        """Return a JSON value as compressed text, and the dictionary with which it was compressed.

        Raise RecursionError if the value is nested deeper than the JSON encoder allows.
        """
        text, used = json.dumps(value, separators=(",", ":")).encode(), self._dictionary
        compressor = zlib.compressobj(zdict=used)
        data = compressor.compress(text) + compressor.flush()
        self._uses += 1
        if self._uses >= DICTIONARY_USES or min(len(text), MAX_DICTIONARY) > 2 * len(used):
            self._dictionary, self._uses = text[:MAX_DICTIONARY], 0
        return data, used


@lru_cache(maxsize=MAX_UNPACKED)
def _unpacked(data: bytes, dictionary: bytes) -> Any:
    return json.loads(zlib.decompressobj(zdict=dictionary).decompress(data))


class _Packed:
    """A JSON value as compressed text. Each subclass compresses its values with a dictionary of its own."""

    __slots__ = ("_data", "_dictionary")
    _PACKING = _Packing()

    def __init_subclass__(cls) -> None:
        cls._PACKING = _Packing()

    def _pack(self, value: Any) -> None:
        self._data, self._dictionary = self._PACKING.packed(value)

    def _unpack(self) -> Any:
        return _unpacked(self._data, self._dictionary)

    def _has_text_of(self, other: "_Packed") -> bool:
        """Return True if the values are certainly equal. Equal values may have other texts, or other dictionaries."""
        return (self._data, self._dictionary) == (other._data, other._dictionary)


class ForecastFigures(NamedTuple):
    """What the metrics of all jobs need of ``status.forecast`` and ``status.usage``.

    Times in seconds: percentiles of the remaining time, and what a stop would cost now: since the last checkpoint, and
    for a restart. ``devices``: those that the job holds.
    """

    slack_s: float | None
    p10_s: float
    p50_s: float
    p90_s: float
    unsaved_s: float
    restart_s: float
    devices: float


_FIGURES = Struct("7d")


class _Brief(NamedTuple):
    """The parts of a status that are the same for many jobs. ``conditions``: type, status and reason of each."""

    fields: tuple[str, ...]
    phase: str | None
    conditions: tuple[tuple[str, str, str], ...]


class CompactStatus(_Packed, Mapping[str, Any]):
    """The status of a job, equal to the given one, as compressed text.

    ``phase``, ``brief_conditions`` and ``forecast_figures`` are read without decompressing the text. Any other field
    takes 50 us for a running job of 4 pods, unless the same status was read shortly before.
    """

    __slots__ = ("_brief", "_deep", "_figures")

    def __init__(self, status: Mapping[str, Any]) -> None:
        """``status``: a decoded JSON object."""
        phase, figures = status.get("phase"), _figures(status)
        short = phase if isinstance(phase, str) and len(phase) <= MAX_SHARED else None
        self._brief = shared(_Brief(tuple(map(compact, status)), short, _triples(status)))
        self._figures = None
        if figures is not None:
            slack_s, *others = figures
            self._figures = _FIGURES.pack(nan if slack_s is None else slack_s, *others)
        self._deep: Mapping[str, Any] | None = None
        """The status if it cannot be compressed."""
        try:
            self._pack(dict(status))
        except RecursionError:  # Whoever may write the status can nest it deeper than the JSON encoder allows.
            self._deep = compact(dict(status))
            self._pack(None)

    @property
    def brief_conditions(self) -> Mapping[str, tuple[str, str]]:
        return _by_type(self._brief.conditions)

    @property
    def forecast_figures(self) -> ForecastFigures | None:
        if self._figures is None:
            return None
        slack_s, *others = _FIGURES.unpack(self._figures)
        return ForecastFigures(None if isnan(slack_s) else slack_s, *others)

    def __getitem__(self, name: str) -> Any:
        if name == "phase" and self._brief.phase is not None:
            return self._brief.phase
        if name not in self._brief.fields:
            raise KeyError(name)
        return self._unpack()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._brief.fields)

    def __len__(self) -> int:
        return len(self._brief.fields)

    def __contains__(self, name: object) -> bool:
        return name in self._brief.fields

    def items(self) -> ItemsView[str, Any]:
        return cast(Mapping[str, Any], self._unpack()).items()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CompactStatus):
            own, others = self._brief, other._brief
            if (own.phase, own.conditions, self._figures) != (others.phase, others.conditions, other._figures):
                return False
            if self._deep is None and other._deep is None and self._has_text_of(other):
                return True
            other = other._unpack()
        return bool(self._unpack() == other)

    __hash__ = None  # type: ignore[assignment]

    def _unpack(self) -> Any:
        return super()._unpack() if self._deep is None else self._deep


def brief_conditions(status: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
    """Return type → (status, reason) of the conditions of a job's status.

    Whoever may write the status can write what the operator never does. Conditions after the first ``MAX_BRIEF`` are
    left out, and texts longer than ``MAX_SHARED`` are empty, so that the values that are shared stay small.
    """
    return status.brief_conditions if isinstance(status, CompactStatus) else _by_type(_triples(status))


def forecast_figures(status: Mapping[str, Any]) -> ForecastFigures | None:
    """Return the figures of the forecast in a job's status; None without a forecast."""
    return status.forecast_figures if isinstance(status, CompactStatus) else _figures(status)


def _triples(status: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    conditions = status.get("conditions")
    given = conditions[:MAX_BRIEF] if isinstance(conditions, list | tuple) else ()
    items = [item for item in given if isinstance(item, dict)]
    return tuple((_text(item, "type"), _text(item, "status"), _text(item, "reason")) for item in items)


def _text(item: Mapping[str, Any], name: str) -> str:
    found = item.get(name)
    return found if isinstance(found, str) and len(found) <= MAX_SHARED else ""


@lru_cache(maxsize=4096)
def _by_type(triples: tuple[tuple[str, str, str], ...]) -> Mapping[str, tuple[str, str]]:
    return {kind: (value, reason) for kind, value, reason in triples}


def _figures(status: Mapping[str, Any]) -> ForecastFigures | None:
    forecast, usage = status.get("forecast"), status.get("usage")
    if not forecast or not isinstance(forecast, Mapping):
        return None
    rate = usage.get("rate") if isinstance(usage, Mapping) else None
    devices = rate.get("devices") if isinstance(rate, Mapping) else None
    # A status that an earlier release wrote has no 10th percentile.
    median_s = _number(forecast.get("remainingSeconds"), 0.0)
    return ForecastFigures(
        _number(forecast.get("deadlineSlackSeconds"), None),
        _number(forecast.get("remainingSecondsP10"), median_s), median_s,
        _number(forecast.get("remainingSecondsP90"), median_s),
        _number(forecast.get("unsavedSeconds"), 0.0), _number(forecast.get("restartSeconds"), 0.0),
        _number(devices, 0.0),
    )  # fmt: skip


def _number(value: object, other: Default) -> float | Default:
    """Return a finite number of a JSON value, and ``other`` for any other value."""
    try:
        found = float(value) if isinstance(value, int | float) else nan
    except OverflowError:
        found = nan
    return found if isfinite(found) else other


class CompactTexts(_Packed, Mapping[str, str]):
    """The texts of a ConfigMap, equal to the given ones, as compressed text."""

    __slots__ = ("_names",)

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._names = shared(tuple(map(compact, texts)))
        self._pack(list(texts.values()))

    def items(self) -> ItemsView[str, str]:
        return dict(zip(self._names, self._unpack(), strict=True)).items()

    def __getitem__(self, name: str) -> str:
        return str(dict(self.items())[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CompactTexts) and self._names == other._names and self._has_text_of(other):
            return True
        return Mapping.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]


class CompactJson(_Packed):
    """A JSON value (``value``) as compressed text. It is equal to another one with an equal value."""

    __slots__ = ()

    def __init__(self, value: Any) -> None:
        """Raise RecursionError if the value is nested deeper than the JSON encoder allows."""
        self._pack(value)

    @property
    def value(self) -> Any:
        """Return the value. Do not change it: equal values may be the same object."""
        return self._unpack()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompactJson):
            return NotImplemented
        return self._has_text_of(other) or self.value == other.value

    __hash__ = None  # type: ignore[assignment]
