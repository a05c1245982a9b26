"""When kopf's watches of DLJobs were last active, in each namespace.

kopf has one watch for each namespace. One of them may fall silent while the others go on.
"""

from collections.abc import Awaitable, Callable, Iterable
from time import monotonic

from dljob.kube.answers import ApiError
from dljob.kube.kinds import DLJOB
from dljob.kube.watch.reflector import TEMPORARY

Misses = Callable[[str | None], Awaitable[bool]]
"""Ask the API server whether the watch of a namespace (None: all) has missed a change. It may raise ApiError."""


class WatchActivity:
    """The last signs that the watches of DLJobs work. All times are monotonic, in seconds."""

    def __init__(self, namespaces: Iterable[str], silence_s: float) -> None:
        """``namespaces``: those with a watch of their own; empty: one watch for all. ``silence_s``: see ``check``."""
        self._silence_s = silence_s
        watches: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._active_at = dict.fromkeys(watches, monotonic())
        """Time at which a watch last was active, or was found to have missed nothing."""
        self._asked_at = dict(self._active_at)
        """Time at which kopf last sent a request for DLJobs.

        While no event arrives, kopf's watcher sends one every ``silence_s`` seconds. An old time means that it ended.
        """
        self._checked_at = dict(self._active_at)
        self._broken = set[str | None]()
        """Namespaces whose watch did not work at its last check, and has not been active since."""

    def active(self, namespace: str | None) -> None:
        """Note that the watch of a namespace (None: of all) is active, or that its silence has a known reason."""
        if namespace in self._active_at:
            self._active_at[namespace] = monotonic()
            self._broken.discard(namespace)

    def asked(self, namespace: str | None) -> None:
        """Note that kopf has sent a request for the DLJobs of a namespace (None: of all)."""
        if namespace in self._asked_at:
            self._asked_at[namespace] = monotonic()

    def silent_s(self) -> dict[str, float]:
        """Return the name of each watch → seconds since it was last active. Any thread may call this method."""
        now = monotonic()
        return {
            DLJOB.plural if namespace is None else f"{DLJOB.plural} in {namespace}": now - active_at
            for namespace, active_at in self._active_at.items()
        }

    async def check(self, misses: Misses) -> None:
        """Note that the watches that are silent for ``silence_s`` seconds are active, except those that do not work.

        A silent watch works if it has missed nothing and kopf has sent a request within 2 x ``silence_s`` seconds, or
        if the API server does not answer. It then takes a minute for each question. So the other silent watches count
        as working too, and come first in a later check, except those that did not work before. Otherwise, an operator
        of many namespaces would be restarted again and again while its API server is down.
        """
        now, unanswered = monotonic(), False
        silent = [each for each, active_at in self._active_at.items() if now - active_at >= self._silence_s]
        for namespace in sorted(silent, key=lambda each: self._checked_at[each]):
            if unanswered and namespace in self._broken:
                continue
            if not unanswered:
                self._checked_at[namespace] = monotonic()
                try:
                    if await misses(namespace) or monotonic() - self._asked_at[namespace] >= 2 * self._silence_s:
                        self._broken.add(namespace)
                        continue
                except ApiError as error:
                    unanswered = error.code in TEMPORARY
            self.active(namespace)
