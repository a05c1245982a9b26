"""Limit how often the operator writes the mere progress of jobs, over all jobs.

Every write of a status costs the API server tens of milliseconds of processor time, because it validates the whole
object. A job reports every 10 seconds, so that thousands of running jobs would keep several of its cores busy with
progress. The places of hundreds of jobs in the queue, and the devices that they lack, change with each job that comes
or ends. What has other consequences (a condition, a phase, an end) is written at once.
"""

from collections.abc import Callable, Hashable, Mapping
from math import inf
from typing import Any

from dljob.status.patch import merge_patch

PROGRESS = frozenset(
    {"conditions", "eta", "forecast", "lastCheckpoint", "measured", "progress", "queue", "remaining", "target", "usage"}
)
"""Fields that change while a job does nothing but train or wait. Of conditions, only messages do."""
BURST = 40
"""Number of writes that may follow one another at once, after a time with few of them."""
WAITING_BURST = 4
"""The same for jobs that wait. More would delay the writes of other jobs that follow."""
WAITING_SHARE = 0.5
"""Writes of jobs that wait, as a share of the rate of those that run."""
PROMPT_PLACES = 10
"""Number of jobs at the head of the queue whose status shows a new place at once."""
SOON_S = 1e-3
"""A turn that comes within this time has come: sums of intervals are rounded."""


def only_progress(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return True if two statuses of a job differ at most in how far it is. ``old``, ``new``: as in the DLJob.

    A new place among the first ``PROMPT_PLACES`` of the queue is more than that.
    """
    if _place(new) != _place(old) and _place(new) <= PROMPT_PLACES:
        return False
    return merge_patch(old, new).keys() <= PROGRESS and _states(old) == _states(new)


def _place(status: Mapping[str, Any]) -> float:
    return float((status.get("queue") or {}).get("position", inf))


def _states(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions of a status without their messages."""
    return [{k: v for k, v in each.items() if k != "message"} for each in status.get("conditions", ())]


class ProgressPace:
    """Gives each job its turn to write progress, so that all jobs together write at most ``rate`` times a second.

    Jobs that wait have turns of their own, of which there are fewer (``WAITING_SHARE``), so that their places in the
    queue never delay what running jobs report. A job keeps its turn until it has come, whatever changes until then. Use
    it in one event loop only.
    """

    def __init__(self, rate: float, clock: Callable[[], float], burst: int = BURST) -> None:
        """``rate``: writes per second. ``clock``: returns a time in seconds that never decreases."""
        self._running = _Turns(rate, clock, burst)
        self._waiting = _Turns(rate * WAITING_SHARE, clock, min(burst, WAITING_BURST))

    def wait_s(self, job: Hashable, *, waits: bool = False) -> float:
        """Return the seconds until it is the job's turn. 0: it may write now, and this was its turn.

        ``waits``: True: the job waits for devices.
        """
        turns, others = (self._waiting, self._running) if waits else (self._running, self._waiting)
        others.forget(job)
        return turns.wait_s(job)

    def forget(self, job: Hashable) -> None:
        """Forget the turn of a job that has written its status, or is gone."""
        self._running.forget(job)
        self._waiting.forget(job)


class _Turns:
    def __init__(self, rate: float, clock: Callable[[], float], burst: int) -> None:
        self._interval_s, self._clock, self._burst = 1 / rate, clock, burst
        self._next_s = -inf
        """The next turn that no job has."""
        self._turns: dict[Hashable, float] = {}

    def wait_s(self, job: Hashable) -> float:
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
        self._turns.pop(job, None)
