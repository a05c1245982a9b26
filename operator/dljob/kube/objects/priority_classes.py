"""Reduce PriorityClasses to the fields that the operator needs, and look up those of jobs in the cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PriorityClassSeen:
    value: int
    default: bool = False
    """True if the class applies to pods that name no class (``globalDefault``)."""
    preempts: bool = True
    """False if its jobs never preempt others (``preemptionPolicy: Never``)."""


def priority_class(body: Mapping[str, Any]) -> PriorityClassSeen:
    preempts = body.get("preemptionPolicy") != "Never"
    return PriorityClassSeen(int(body.get("value") or 0), bool(body.get("globalDefault")), preempts)


class PriorityClasses:
    def __init__(self, entries: Mapping[tuple[str, str], Any]) -> None:
        """``entries``: the cached PriorityClasses (``CachedObject``), by ("", name)."""
        self._entries = entries

    def value(self, name: str | None) -> int:
        """Return the value of a PriorityClass. If it does not exist, return that of the cluster's default class, or 0.

        Kubernetes uses the lowest value if several classes are the default.
        """
        found = self._find(name)
        return 0 if found is None else found.value

    @property
    def default(self) -> str:
        """Return the name of the cluster's default class; empty if there is none."""
        defaults = ((each.seen.value, name) for (_, name), each in self._entries.items() if each.seen.default)
        return min(defaults, default=(0, ""))[1]

    def preempts(self, name: str | None) -> bool:
        """Return True if the PriorityClass, or the default class if it does not exist, lets its jobs preempt others."""
        found = self._find(name)
        return found is not None and found.preempts

    def lacks(self, name: str | None) -> bool:
        """Return True if a PriorityClass certainly does not exist.

        Every cluster has some classes. If none is cached, the operator may not read them: return False.
        """
        return bool(self._entries) and name is not None and ("", name) not in self._entries

    def values(self) -> tuple[tuple[str, int, bool], ...]:
        """Return (name, value, True for a default class) of all classes."""
        return tuple((name, each.seen.value, each.seen.default) for (_, name), each in self._entries.items())

    def _find(self, name: str | None) -> PriorityClassSeen | None:
        if name is not None and (found := self._entries.get(("", name))) is not None:
            named: PriorityClassSeen = found.seen
            return named
        defaults = (entry.seen for entry in self._entries.values() if entry.seen.default)
        return min(defaults, key=lambda each: each.value, default=None)
