"""Store decoded JSON in less memory. The module does no I/O."""

from sys import intern
from typing import Any

MAX_SHARED = 128
"""Maximum length of a string that is shared with equal ones. Longer ones are mostly messages, which differ."""
MAX_DEPTH = 16
"""Levels of nesting below which values stay as they are."""


def compact(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Return an equal value whose short strings are shared with all other values of this function.

    Each object that the JSON decoder returns has strings of its own, also for the names of its fields. In the spec and
    status of a typical job, these take half of the memory. ``levels``: levels of nesting to look at.
    """
    if isinstance(value, str):
        return intern(value) if len(value) <= MAX_SHARED and type(value) is str else value
    if not levels:
        return value
    if isinstance(value, dict):
        return {compact(name, 0): compact(item, levels - 1) for name, item in value.items()}
    if isinstance(value, list):
        return [compact(item, levels - 1) for item in value]
    return value
