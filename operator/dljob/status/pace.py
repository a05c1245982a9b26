"""Limit how often the operator writes the mere progress of jobs, over all jobs.

Every write of a status costs the API server tens of milliseconds of processor time, because it validates the whole
object. A job reports every 10 seconds, so that thousands of running jobs would keep several of its cores busy with
progress. What has other consequences (a condition, a phase, an end) is written at once.
"""

from collections.abc import Callable, Hashable, Mapping
from math import inf
from typing import Any

from dljob.status.patch import merge_patch

PROGRESS = frozenset(
    {"conditions", "eta", "forecast", "lastCheckpoint", "measured", "progress", "remaining", "target", "usage"}
)
"""Fields that change while a job does nothing but train. Of conditions, only messages do."""
BURST = 40
"""Number of writes that may follow one another at once, after a time with few of them."""


SOON_S = 1e-3
"""A turn that comes within this time has come: sums of intervals are rounded."""


def only_progress(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return True if two statuses of a job differ at most in how far it is. ``old``, ``new``: as in the DLJob."""
    return merge_patch(old, new).keys() <= PROGRESS and _states(old) == _states(new)


def _states(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions of a status without their messages."""
    return [{k: v for k, v in each.items() if k != "message"} for each in status.get("conditions", ())]


class ProgressPace:
    """Gives each job its turn to write progress, so that all jobs together write at most ``rate`` times a second.

    A job that has to wait keeps its turn, whatever it reports until then. Use it in one event loop only.
    """

    def __init__(self, rate: float, clock: Callable[[], float], burst: int = BURST) -> None:
        """``rate``: writes per second. ``clock``: returns a time in seconds that never decreases."""
        self._interval_s, self._clock, self._burst = 1 / rate, clock, burst
        self._next_s = -inf
        """The next turn that no job has."""
        self._turns: dict[Hashable, float] = {}

    def wait_s(self, job: Hashable) -> float:
        """Return the seconds until it is the job's turn. 0: it may write now, and this was its turn."""
        now_s = self._clock()
        turn_s = self._turns.pop(job, None)
        if turn_s is None:
            turn_s = max(self._next_s, now_s - (self._burst - 1) * self._interval_s)
            self._next_s = turn_s + self._interval_s
        if turn_s <= now_s + SOON_S:
            return 0.0
        self._turns[job] = turn_s
        return turn_s - now_s

    def forget(self, job: Hashable) -> None:
        """Forget the turn of a job that has written its status, or is gone."""
        self._turns.pop(job, None)
