"""Rebalance local batch sizes (shares) by the speeds that are measured while training.

All ranks exchange their measurements together with the gradients. Every rank then computes with the same numbers, so
all ranks make the same decision without another message. A change of shares is a trial: it is reverted unless steps
become shorter, so a wrong prediction costs only one window (at least 20 steps and 2 s). Predictions can be wrong
because the time of a step is not linear in the share: under a CPU quota, a waiting rank accumulates CPU time and seems
faster than it can be in the long run.
"""

from collections.abc import Sequence
from statistics import fmean

from dltrain.batch.shares import Speed, fit, worthwhile

WINDOW_STEPS = 20
WINDOW_S = 2.0
"""Minimum number of steps and minimum duration in seconds of a window, a sequence of steps whose times are averaged.

2 s are twenty periods of a CPU quota. In each period, a process that has used up its quota is stopped for the rest of
the period."""
SETTLING_STEPS = 2
"""Number of steps that are not measured after a change of local batch sizes, because they allocate new buffers."""
MIN_PREDICTED_GAIN = 0.05
"""Minimum fraction by which new local batch sizes must reduce the predicted computing time of the slowest rank.

Otherwise they are not tried.
"""
MIN_MEASURED_GAIN = 0.02
"""Minimum fraction by which new local batch sizes must shorten the measured steps. Otherwise they are reverted."""
MEMORY = 4
"""Number of last windows (sequences of measured steps) from which a rank's speed is estimated.

A line is fitted to the points (local batch size, seconds per step) of these windows.
"""
LONGEST_REST = 64
"""Maximum number of windows (sequences of measured steps) without a trial of new local batch sizes.

If a trial does not make steps shorter, the next one must wait. Each such failure in a row doubles the wait, up to this
number.
"""


class Balance:
    """Measure steps and propose local batch sizes (shares) that make steps shorter. All ranks have the same state."""

    def __init__(self, shares: Sequence[int], limits: Sequence[int]) -> None:
        """Begin with ``shares``, the local batch size of each rank; 0 for parameter servers.

        ``limits``: the largest local batch size of each rank that fits into its memory.
        """
        self.shares = tuple(shares)
        self._limits = tuple(limits)
        self._best: tuple[int, ...] | None = None
        self._best_step_s = 0.0
        self._seen: list[list[tuple[int, float]]] = [[] for _ in shares]
        self._rest, self._failures = 0, 0
        self._begin()

    def _begin(self) -> None:
        self._skip = SETTLING_STEPS
        self._computed: list[Sequence[float]] = []
        self._demanded: list[Sequence[float]] = []
        self._step_s: list[float] = []

    def add(self, computed_s: Sequence[float], demanded_s: Sequence[float], step_s: float) -> tuple[int, ...] | None:
        """Add the times of a step. Return new local batch sizes for the next step, or None to keep the current ones.

        All times are in seconds. ``computed_s``: each rank's computing time. ``demanded_s``: for each rank, the
        estimated time of the step if the rank computed without waiting, which is its CPU time divided by the fraction
        of a CPU that it gets (see ``stopwatch.Budget``); 0 if unknown. ``step_s``: the time of the whole step.
        """
        if self._skip:
            self._skip -= 1
            return None
        self._computed.append(computed_s)
        self._demanded.append(demanded_s)
        self._step_s.append(step_s)
        if len(self._step_s) < WINDOW_STEPS or sum(self._step_s) < WINDOW_S:
            return None
        mean_step_s = fmean(self._step_s)
        computed, demanded = (
            [fmean(of) for of in zip(*rows, strict=True)] for rows in (self._computed, self._demanded)
        )
        for seen, share, *seconds in zip(self._seen, self.shares, computed, demanded, strict=True):
            seen.append((share, max(seconds)))
            del seen[:-MEMORY]
        self._begin()
        if self._best not in (None, self.shares) and mean_step_s > (1 - MIN_MEASURED_GAIN) * self._best_step_s:
            self._failures += 1
            self._rest = min(2**self._failures, LONGEST_REST)
            return self._change(self._best or self.shares)
        if self._best != self.shares:
            self._failures = 0
        self._best, self._best_step_s = self.shares, mean_step_s
        if self._rest:
            self._rest -= 1
            return None
        better = self._better()
        return self._change(better) if better is not None else None

    def _change(self, shares: tuple[int, ...]) -> tuple[int, ...]:
        self.shares = shares
        return shares

    def _better(self) -> tuple[int, ...] | None:
        workers = [rank for rank, share in enumerate(self.shares) if share]
        speeds = [self._speed(rank) for rank in workers]
        now, limits = [self.shares[rank] for rank in workers], [self._limits[rank] for rank in workers]
        better = worthwhile(speeds, now, sum(now), gain=MIN_PREDICTED_GAIN, limits=limits)
        if better is None:
            return None
        moved = dict(zip(workers, better, strict=True))
        return tuple(moved.get(rank, 0) for rank in range(len(self.shares)))

    def _speed(self, rank: int) -> Speed:
        return fit(self._seen[rank])
