"""Store decoded JSON in less memory. The module does no I/O.

As Python objects, the plan in the status of a job of 4 pods takes 6 KiB, and its texts in the ConfigMap 3 KiB. As
compressed text, these take 2 KiB together. They are read when the job is reconciled, but not by the loops over all
jobs.
"""

import json
import zlib
from collections.abc import Hashable, ItemsView, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

MAX_SHARED = 128
"""Maximum length of a string that is shared with equal ones. Longer ones are mostly messages, which differ."""
MAX_STRINGS = 2**14
"""Maximum number of known strings. ``sys.intern`` has no such limit, and Python 3.12 never frees its strings.

Most strings are times and messages, which soon exist nowhere else. Those that are shared come again after a clearing.
"""
MAX_DEPTH = 16
"""Levels of nesting below which values stay as they are."""
READ_OFTEN = frozenset({"conditions", "forecast", "usage"})
"""Fields of the status that loops over all jobs read, so that they are not packed."""
MAX_UNPACKED = 16
"""Number of packed values that stay decoded: a reconcile reads the same status several times."""
_KNOWN: dict[str, str] = {}
T = TypeVar("T", bound=Hashable)


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


class CompactStatus(Mapping[str, Any]):
    """The status of a job, equal to the given one. Maps and lists are packed, except those of ``READ_OFTEN``.

    Unpacking those of a running job of 4 pods takes 50 us.
    """

    __slots__ = ("_packed", "_packed_names", "_parts")

    def __init__(self, status: Mapping[str, Any]) -> None:
        """``status``: a decoded JSON object."""
        seldom = {name: value for name, value in status.items() if isinstance(value, dict | list)}
        seldom = {name: value for name, value in seldom.items() if name not in READ_OFTEN}
        try:
            self._packed = _packed(seldom)
        except RecursionError:  # Whoever may write the status can nest it deeper than the JSON encoder allows.
            seldom, self._packed = {}, _packed({})
        self._packed_names = shared(tuple(seldom))
        self._parts: dict[str, Any] = compact({name: value for name, value in status.items() if name not in seldom})

    def __getitem__(self, name: str) -> Any:
        if name in self._packed_names:
            return _unpacked(self._packed)[name]
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._parts
        yield from self._packed_names

    def __len__(self) -> int:
        return len(self._parts) + len(self._packed_names)

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in self._packed_names

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CompactStatus) and (self._parts, self._packed) == (other._parts, other._packed):
            return True
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


class CompactTexts(Mapping[str, str]):
    """The texts of a ConfigMap, equal to the given ones. They are packed."""

    __slots__ = ("_names", "_packed")

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._names = tuple(map(compact, texts))
        self._packed = _packed(list(texts.values()))

    def items(self) -> ItemsView[str, str]:
        return dict(zip(self._names, _unpacked(self._packed), strict=True)).items()

    def __getitem__(self, name: str) -> str:
        return str(dict(self.items())[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CompactTexts) and (self._names, self._packed) == (other._names, other._packed):
            return True
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


@lru_cache(maxsize=MAX_UNPACKED)
def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))
