"""Measurement of the fastest collective for each buffer size at the start of a run.

Formulas predict the order of algorithms well, but only measurements show the effect of network, kernel and MPI library.
On one machine, the best segment size was 16 KiB over a slow link and 1 MiB over a fast one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dltrain.comm.core.collective import Collective, Work
from dltrain.comm.core.fault_tolerance import duplicate, translate
from dltrain.comm.core.polling import Run
from dltrain.comm.core.waiting import wait_until

BUDGET_S = 0.4
"""Time limit in seconds for comparing the candidates on one buffer. A single slow all-reduce can exceed the limit.

A candidate is an all-reduce algorithm with a segment size.
"""
_ROUNDS = (3, 40)
"""Minimum and maximum number of measurements per remaining candidate. The time limit applies after the minimum."""
_FIRST_NBYTES = 256 * 2**10
_TRIAL_S, _FINAL_S = 10e-3, 50e-3
"""Maximum time in seconds of one all-reduce: ``_TRIAL_S`` while all candidates are compared, then ``_FINAL_S`` while
the best candidates are compared. If a buffer would take longer, only its first part is reduced."""
_FINALISTS = 4
_MEASUREMENT_S = 1e-3
"""Approximate duration of one measurement in seconds. Shorter all-reduces are repeated, at most 100 times."""
_ELIMINATION_RATIO = 3.0
"""A candidate is eliminated if its first measurement is slower than the best one's by this factor. The factor is large,
because a rank that loses its CPU for a moment doubles a measurement."""


@dataclass(frozen=True)
class Pick:
    """An all-reduce algorithm with its segment size: a candidate, or the choice for all buffers of one size class.

    A buffer's size class is log4 of its bytes, rounded down. ``strategy``: the name of the algorithm, such as "Ring".
    """

    strategy: str
    segment_nbytes: int = 0
    """Size of the messages into which a buffer is cut. 0: the collective does not cut, or chooses the size itself."""
    bandwidth_Bps: float = field(default=0.0, compare=False)
    """Measured bytes of the buffer per second. 0: not measured."""

    def __str__(self) -> str:
        cut = f" in segments of {self.segment_nbytes >> 10} KiB" if self.segment_nbytes else ""
        return f"{self.strategy}{cut}"


Picks = Mapping[int, Pick]
"""The chosen collectives by size class. A buffer's size class is log4 of its bytes, rounded down."""
Make = Callable[[Any, list[torch.Tensor], Pick], Collective]
"""A function that creates the collective that a ``Pick`` names: (communicator, buffers, pick) → collective."""


def size_class(nbytes: int) -> int:
    return max(0, nbytes.bit_length() - 1) // 2


class Auto(Collective):
    """A collective that reduces each buffer with the algorithm that was measured to be fastest for its size."""

    name = "Auto"

    def __init__(
        self, comm: Any, buffers: list[torch.Tensor], make: Make, candidates: Sequence[Pick], picks: Picks | None = None
    ) -> None:
        """Measure the ``candidates`` (the most likely first) on ``buffers``, which must contain only zeros.

        ``make``: creates the collective of a candidate. ``picks``: results of an earlier measurement, or None. If they
        cover the size classes of all buffers, nothing is measured and ``picks`` is used. All ranks must call this
        together. Raise PeerLostError if a rank is lost during the call.
        """
        super().__init__(comm, buffers)
        self._make = make
        self._strategies = {candidate.strategy for candidate in candidates}
        self._parts: list[Collective] = []
        classes = {size_class(buffer.nbytes): buffer for buffer in buffers}
        if picks is None or not set(classes) <= set(picks):
            picks, order = {}, list(candidates)
            for number in sorted(classes):
                picks[number] = self._measured(classes[number], order)
                # The time limit may allow only one or two candidates for large buffers, so begin with the best one for
                # the previous size.
                order.sort(key=lambda pick: pick != picks[number])
        self.use(picks)

    def reuse(self, picks: Picks) -> None:
        """Use ``picks``, the algorithms of an earlier run, so that numbers are added in the same order as in that run.

        Ignore ``picks`` if it lacks the size class of a buffer or names an algorithm that is not a candidate here. All
        ranks must call this method together, while no reduction is pending. Raise PeerLostError if a rank is lost
        during the call.
        """
        mine = {number: picks.get(number) for number in self.picks}
        if mine != self.picks and all(pick is not None and pick.strategy in self._strategies for pick in mine.values()):
            self.use({number: pick for number, pick in mine.items() if pick is not None})

    def use(self, picks: Picks) -> None:
        """From now on, reduce each buffer with the algorithm that ``picks`` names for the size class of this buffer.

        All ranks must call this method together, because it duplicates the communicator.
        """
        for part in self._parts:
            part.close()
        self.picks = dict(picks)
        self._routes: list[tuple[Collective, int]] = [(self, 0)] * len(self.buffers)
        self._parts = []
        chosen = [picks[size_class(buffer.nbytes)] for buffer in self.buffers]
        for pick in dict.fromkeys(chosen):
            members = [index for index, its in enumerate(chosen) if its == pick]
            part = self._make(duplicate(self.comm), [self.buffers[index] for index in members], pick)
            self._parts.append(part)
            for position, index in enumerate(members):
                self._routes[index] = (part, position)
        runs: list[Run] = [run for part in self._parts for run in getattr(part, "runs", ())]
        for run in runs:
            run.siblings = runs

    def start(self, index: int) -> Work:
        part, position = self._routes[index]
        return part.start(position)

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()
        super().abandon()

    def close(self) -> None:
        for part in self._parts:
            part.close()
        self._parts = []

    def _measured(self, buffer: torch.Tensor, candidates: Sequence[Pick]) -> Pick:
        """Return the fastest of ``candidates`` on ``buffer``. All ranks get the same result.

        If a buffer is too long for many all-reduces, all candidates are compared on its beginning. Then the best
        candidates are compared on a longer part.
        """
        part = buffer[: max(1, _FIRST_NBYTES // buffer.itemsize)]
        if len(part) < len(buffer):
            first = self._make(self.comm, [part], candidates[0])
            self._timed(first, 1)  # the first all-reduce opens connections and touches memory
            part = buffer[: max(len(part), int(len(part) * _TRIAL_S / self._timed(first, 1)))]
            first.close()
        ranking = self._race(part, candidates)
        longer = buffer[: int(len(part) * _FINAL_S / ranking[0][1])]
        if len(longer) > len(part):
            part, ranking = longer, self._race(longer, [pick for pick, _ in ranking[:_FINALISTS]])
        best, best_interval_s = ranking[0]
        return Pick(best.strategy, best.segment_nbytes, part.nbytes / best_interval_s)

    def _race(self, buffer: torch.Tensor, candidates: Sequence[Pick]) -> list[tuple[Pick, float]]:
        """Measure ``candidates`` on ``buffer``. Return (candidate, typical seconds of an all-reduce), fastest first.

        Candidates that are far slower than the best one, or for which no time is left, are missing.
        """
        began = time.perf_counter()
        race: dict[Pick, Collective] = {}
        times: dict[Pick, list[float]] = {}
        repeats: dict[Pick, int] = {}
        cuts: set[tuple[str, int]] = set()
        for pick in candidates:
            cut = (pick.strategy, min(pick.segment_nbytes, buffer.nbytes))
            if cut in cuts:
                continue  # both candidates send the buffer in one segment
            cuts.add(cut)
            if race and self._agreed(time.perf_counter() - began > BUDGET_S):
                break
            race[pick] = self._make(self.comm, [buffer], pick)
            self._timed(race[pick], 1)  # the first all-reduce opens connections and touches memory
            first_s = self._timed(race[pick], 1)
            repeats[pick] = max(1, min(100, int(_MEASUREMENT_S / first_s)))
            times[pick] = [first_s if repeats[pick] == 1 else self._timed(race[pick], repeats[pick])]
        limit_s = _ELIMINATION_RATIO * min(seconds[0] for seconds in times.values())
        left = [pick for pick in race if times[pick][0] <= limit_s]
        for done in range(_ROUNDS[1]):
            if len(left) == 1 or (self._agreed(time.perf_counter() - began > BUDGET_S) and done >= _ROUNDS[0] - 1):
                break
            for pick in left:
                times[pick].append(self._timed(race[pick], repeats[pick]))
        for collective in race.values():
            collective.close()
        return sorted(((pick, _typical(times[pick])) for pick in left), key=lambda found: found[1])

    def _timed(self, collective: Collective, repeats: int) -> float:
        """Return the seconds that one all-reduce takes on the slowest rank, as the mean of ``repeats`` all-reduces.

        All ranks start together and get the same value.
        """
        self._max(0.0)
        began = time.perf_counter()
        for _ in range(repeats):
            collective.allreduce(0)
        return self._max((time.perf_counter() - began) / repeats)

    def _agreed(self, mine: bool) -> bool:
        """Return True on all ranks if ``mine`` is true on any rank, so that all ranks make the same decision."""
        return self._max(float(mine)) > 0

    def _max(self, mine: float) -> float:
        from mpi4py import MPI

        maximum = np.array([mine])
        try:
            request = self.comm.Iallreduce(MPI.IN_PLACE, maximum, MPI.MAX)
            wait_until(request.Test)
        except MPI.Exception as error:
            raise translate(error) from error
        return float(maximum[0])


def _typical(times: list[float]) -> float:
    """Return the lower quartile of ``times``, in seconds, as the typical time of an all-reduce.

    Disturbances only add time. If there are few measurements, disturbances may affect most of them, so that the median
    would be too high.
    """
    return sorted(times)[len(times) // 4]
