"""Merge users' overrides into a manifest: maps key by key, lists of named items by name. Replace all other values."""

from collections.abc import Mapping
from typing import Any

_KEYS = ("name", "mountPath", "containerPort", "topologyKey")
"""Fields that may identify the items of a list in a pod spec. The first one that all items have identifies them."""


def merged(base: Any, change: Any) -> Any:
    """Return ``base`` with ``change`` merged into it, as new objects. A null in ``change`` removes a field of a map."""
    if isinstance(base, Mapping) and isinstance(change, Mapping):
        result = {key: value for key, value in base.items() if not (key in change and change[key] is None)}
        for key, value in change.items():
            if value is not None:
                result[key] = merged(base[key], value) if base.get(key) is not None else merged({}, value)
        return result
    if isinstance(change, Mapping):
        return {key: merged({}, value) for key, value in change.items() if value is not None}
    if isinstance(base, list) and isinstance(change, list):
        return _merged_lists(base, change)
    return list(change) if isinstance(change, list) else change


def _merged_lists(base: list[Any], change: list[Any]) -> list[Any]:
    key = _key(base, change)
    if key is None:
        return list(change)
    result = {item[key]: item for item in base}
    for item in change:
        result[item[key]] = merged(result.get(item[key], {}), item)
    return list(result.values())


def _key(base: list[Any], change: list[Any]) -> str | None:
    items = [*base, *change]
    if not items or not all(isinstance(item, Mapping) for item in items):
        return None
    return next((key for key in _KEYS if all(key in item for item in items)), None)
