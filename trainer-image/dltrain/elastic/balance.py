"""Shares that follow the speeds measured while training: when to try others, and when to go back.

Every rank feeds the same numbers (they travel with the gradients), so all come to the same decision without a message.
A change is a trial: it stays only if the steps really became shorter, so a wrong guess costs one window. Guesses can be
wrong because speed is not a line: under a CPU quota a rank that waits saves up its budget and looks faster than it can
be for long.
"""

from collections.abc import Sequence
from statistics import fmean

from dltrain.batch.shares import Speed, fit, worthwhile

WINDOW_STEPS = 20
WINDOW_S = 2.0
"""A window has at least so many steps and takes so long: twenty periods of a CPU quota, of which a process is stopped
for the rest of each once it has used its part."""
SETTLING_STEPS = 2
"""Steps after a change that are not counted: buffers of a new size are allocated in the first."""
MIN_PREDICTED_GAIN = 0.05
"""A trial must promise to shorten the slowest rank's computing by this part."""
MIN_MEASURED_GAIN = 0.02
"""... and is kept when steps became shorter by this part."""
MEMORY = 4
"""Windows of each rank that a line through (share, seconds) is fitted to."""
LONGEST_REST = 64
"""Windows between a failed trial and the next, at most; their number doubles with every failure."""


class Balance:
    """Watches steps and proposes shares. One for each rank, all equal."""

    def __init__(self, shares: Sequence[int], limits: Sequence[int]) -> None:
        """``limits``: most samples of each rank, what its device's memory is known to hold. Ranks of share 0 serve."""
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
        """A step under ``shares``: seconds of computing by rank, seconds that its CPU time takes each rank to come by
        (0 where unknown), and seconds of the whole step. Returns shares to change to.
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
