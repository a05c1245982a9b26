"""JSON merge patches."""

from collections.abc import Mapping
from typing import Any


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the smallest JSON merge patch (RFC 7386) that turns ``old`` into ``new``; empty if they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif isinstance(value, Mapping) and isinstance(old[key], Mapping):
            if nested := merge_patch(old[key], value):
                patch[key] = nested
        elif value != old[key]:
            patch[key] = value
    return patch
