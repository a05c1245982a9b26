"""Detect ranks that hang, in the coordinator: they send no message for longer than their time limit.

No I/O, and no clock.

A rank that trains sends several messages per second. Its time limit is the largest of ten median step times, three
times the 99th percentile of the observed silences (the times between two messages of a rank), and a minimum. A rank can
announce work during which it sends no messages, such as compilation. It then gets the time limit of this work. Until
this limit, no rank counts as hung, because the others may wait for it. A rank that only calls ``dltrain.report`` is
monitored from its first report on. Each restart after a hang raises the limits, because the hang may have been healthy
work that the next attempt (launch of the ranks) repeats. ``agent.coordinator.observed_job`` handles ranks that
SIGSTOP stopped.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

from dltrain.protocol.metric_values import MAX_SILENCE_S
from dltrain.protocol.rank_messages import Activity, Busy, Hello, RankMessage, Step, Working

HANG_MIN_S = 30.0
"""Minimum time limit in seconds of a rank's silence, the time since its last message.

A pinned copy or a stall of storage in the script's own code takes up to this time.
"""
HANG_STEPS = 10.0
HANG_P99 = 3.0
RAISE = 3.0
"""Factor by which each restart after a hang multiplies the time limits."""
REPORTED = 10.0
"""Factor by which the minimum time limit is larger for ranks that only call ``dltrain.report``.

The agent does not learn of the evaluations and other work between their steps.
"""
HANG_MAX_S = 900.0
"""Upper bound of the time limit of a rank's silence in seconds.

Only ten median steps, announced work, time in which ranks or agents could not run, and the time between the first two
reports of a script may exceed it.
"""
START_DEADLINE_S = 900.0
"""Maximum time in seconds that a rank may be silent before its first step. The rank may read a large dataset in this
time."""
ACTIVITY_LIMITS_S: Mapping[Activity, float] = {"compilation": 900.0, "data": 600.0, "checkpoint": 600.0}
"""Maximum seconds between two progress updates of a rank while it does this work, by the kind of the work."""
FIRST_REPORT = 3.0
"""Minimum ratio of the time limit to the time until the first report of a script, before there is an interval.

A script may report once in each epoch. An epoch with its evaluation hardly takes three times as long as the first one.
"""
MOST_EXCUSED = 10.0
SILENCES, REFRESH = 1024, 32
"""Number of last silences from which the 99th percentile is computed, and number of new silences until the next time.

A silence is the time in seconds between two messages of a rank.
"""


@dataclass
class _Rank:
    """The state of one rank in hang detection.

    ``heard_s``: time of its last message. ``base_s``: the part of its time limit, in seconds, that follows from its
    step time; the deadline of its start before its first step. ``stepped``: True after its first step.
    """

    heard_s: float
    base_s: float
    excused_s: float
    """Value of ``HangDetector._excused_s``, in seconds, when the rank's last message arrived."""
    announced_s: float | None = None
    """Time limit of the work that the rank has announced, in seconds from its last message; None: no announced work."""
    active_s: float | None = None
    """Time limit of the work that a thread of the rank has reported (``Working``), in seconds from its last message.

    None: the thread has reported no work since then.
    """
    stepped: bool = False
    reports: bool = False
    """True if the rank's updates are from ``dltrain.report``."""
    interval_unknown: bool = False
    """True if the rank has reported only once, so that the time between its reports is unknown."""


class HangDetector:
    """Decide which rank hangs. A rank hangs if it is silent for longer than its time limit.

    ``minimum_s``: minimum of the time limits in seconds. All times are of one monotonic clock.
    """

    def __init__(self, minimum_s: float = HANG_MIN_S) -> None:
        self._minimum_s = minimum_s
        self._ranks: dict[int, _Rank] = {}
        self._excused_s = 0.0
        """Total seconds so far in which ranks or agents could not run, which do not count as silence."""
        self._silences: deque[float] = deque(maxlen=SILENCES)
        self._fresh = 0
        self._p99_s = 0.0
        self._factor = 1.0
        self._began_s = inf
        self._resumed_s = -inf
        """Time at which a rank last ended announced work. The ranks that waited for this rank continue then."""

    def begin_attempt(self, hangs: int, now_s: float) -> None:
        """Begin an attempt (a launch of all ranks): forget the previous ranks, and set the factor of the time limits.

        ``hangs``: number of restarts of the job so far because of a hang. Each of them raises the time limits.
        ``now_s``: present time.
        """
        self._ranks.clear()
        self._began_s = now_s
        self._resumed_s = -inf
        self._factor = RAISE ** min(hangs, 10)

    def forget(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    def excuse(self, seconds: float) -> None:
        """Subtract ``seconds`` from the current silence of all ranks, because ranks or agents could not run.

        For each rank, subtract at most ``MOST_EXCUSED`` times its time limit.
        """
        self._excused_s += seconds

    def record(self, message: RankMessage, now_s: float) -> None:
        """Record a rank's message, which arrived at ``now_s``."""
        rank = self._ranks.setdefault(message.rank, _Rank(now_s, START_DEADLINE_S, self._excused_s))
        if isinstance(message, Working):  # It is from a thread of the rank, and does not show that the rank proceeds.
            was = rank.active_s
            rank.active_s = None if message.activity is None else ACTIVITY_LIMITS_S[message.activity]
            if was is not None and rank.active_s is None:
                self._resumed_s = now_s
            return
        pausing = rank.announced_s is not None or rank.active_s is not None
        match message:
            case Hello():
                rank.base_s = START_DEADLINE_S
            case Step():
                if rank.stepped and not pausing and not self._pausing(now_s):
                    self._seen(now_s - max(rank.heard_s, self._resumed_s))
                rank.reports, rank.interval_unknown = message.reported, message.reported and message.interval_s is None
                if rank.interval_unknown:
                    rank.base_s = max(START_DEADLINE_S, FIRST_REPORT * (now_s - self._began_s))
                else:
                    rank.base_s = _base_s(message)
                rank.stepped, rank.announced_s = True, None
            case Busy():
                rank.announced_s = max(
                    rank.announced_s or 0.0, self._limit_s(rank), self._floor_s(rank) + message.limit_s
                )
        rank.active_s = None
        if pausing and rank.announced_s is None:
            self._resumed_s = now_s
        rank.heard_s, rank.excused_s = now_s, self._excused_s

    def hung(self, now_s: float) -> tuple[int, float] | None:
        """Return (rank that hangs, seconds since its last message), or None if no rank hangs.

        If several ranks have exceeded their time limits, return the rank that has exceeded its limit by the longest
        time. While a rank does announced work within its limit, no rank hangs: the others may wait for it.
        """
        if self._pausing(now_s):
            return None
        worst = max(((self._late_s(rank, now_s), n) for n, rank in self._ranks.items()), default=None)
        if worst is None or worst[0] <= 0:
            return None
        return worst[1], now_s - self._ranks[worst[1]].heard_s

    def _late_s(self, rank: _Rank, now_s: float) -> float:
        limit_s = self._limit_s(rank)
        given_s = [given for given in (rank.announced_s, rank.active_s) if given is not None]
        heard_s = rank.heard_s
        if given_s:
            limit_s = max(limit_s, *given_s)
        else:
            heard_s = max(heard_s, self._resumed_s)
        return now_s - heard_s - limit_s - min(self._excused_s - rank.excused_s, MOST_EXCUSED * limit_s)

    def _pausing(self, now_s: float) -> bool:
        """Return True if a rank does announced work (such as an evaluation) that has not exceeded its time limit."""
        return any(
            (rank.announced_s is not None or rank.active_s is not None) and self._late_s(rank, now_s) <= 0
            for rank in self._ranks.values()
        )

    def _floor_s(self, rank: _Rank) -> float:
        minimum_s = self._minimum_s * (REPORTED if rank.reports else 1.0)
        return min(HANG_MAX_S, max(minimum_s, HANG_P99 * self._p99_s) * self._factor)

    def _limit_s(self, rank: _Rank) -> float:
        """Return the time limit in seconds of a rank's silence while it does no work that it has announced."""
        if not rank.stepped:
            return rank.base_s
        most_s = MAX_SILENCE_S if rank.interval_unknown else HANG_MAX_S
        return max(rank.base_s, min(most_s, rank.base_s * self._factor), self._floor_s(rank))

    def _seen(self, silence_s: float) -> None:
        self._silences.append(silence_s)
        self._fresh += 1
        if self._fresh >= REFRESH:
            self._fresh = 0
            self._p99_s = sorted(self._silences)[ceil(0.99 * len(self._silences)) - 1]


def _base_s(step: Step) -> float:
    """Return the time limit of a rank's silence in seconds that follows from the step times in its progress update."""
    if step.interval_s is not None:  # A script may report after many steps only, such as once in each epoch.
        return HANG_STEPS * step.interval_s
    return HANG_STEPS * (step.step_s if step.typical_s is None else step.typical_s)
