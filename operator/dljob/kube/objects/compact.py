"""Store decoded JSON in less memory. The module does no I/O."""

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast

MAX_SHARED = 128
"""Maximum length of a string that is shared with equal ones. Longer ones are mostly messages, which differ."""
MAX_STRINGS = 2**17
"""Maximum number of known strings. ``sys.intern`` has no such limit, and Python 3.12 never frees its strings."""
MAX_DEPTH = 16
"""Levels of nesting below which values stay as they are."""
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
