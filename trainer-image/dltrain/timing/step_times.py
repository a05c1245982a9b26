"""The parts of a rank's step times and their means.

Means are used instead of medians. Under a CPU quota, most steps run at full speed and a few pause for most of 100 ms;
the run time includes both.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from dlcontract import RankMeasure

MIN_WINDOW, MAX_WINDOW = 50, 1000
"""Smallest and largest number of steps in a mean. The smallest is few enough to follow changes of long steps."""
WINDOW_S = 1.0
"""Seconds that the steps of a mean take together, within these limits.

The means then span ten periods of a CPU quota, and short loads of the machine, also if a step takes a millisecond.
"""


class Times(NamedTuple):
    """The parts of one step of this rank, in seconds. data_s + compute_s + exposed_s is the step time."""

    data_s: float
    """Time spent waiting for the batch."""
    compute_s: float
    """Time of the forward pass, the backward pass and the update."""
    exposed_s: float
    """Time of exposed communication: waiting for slower ranks, the part of the all-reduce that does not overlap with
    computing, and the agreement of all ranks that the step commits."""
    agree_s: float = 0.0
    """Part of ``exposed_s``: the time in which the ranks of an elastic job agree that the step commits."""
    exposed_cpu_s: float = 0.0
    """CPU time of all threads of this process during ``exposed_s``."""
    fetch_s: float = 0.0
    """Time to make the batch, in this process or in loader workers. The part beyond ``data_s`` overlaps with other
    steps."""
    forward_s: float = 0.0
    """Part of ``compute_s``: the forward passes and the losses. 0 means unknown."""
    backward_s: float = 0.0
    """Part of ``compute_s``: the backward passes. The rest of ``compute_s`` is the update. 0 means unknown."""
    sum_s: float = 0.0
    """Time from the start of the step's first all-reduce to the end of its last one. Most of this time overlaps with
    the backward pass."""


class Window:
    """The times of the last steps, with ``exposed_s`` divided into waiting and communication.

    The number of steps is between ``MIN_WINDOW`` and ``MAX_WINDOW``. Within these limits, it is the smallest one whose
    steps take ``WINDOW_S`` seconds together.

    The slowest rank waits for no other rank. Its exposed time, the minimum over all ranks, is communication. Any excess
    over this minimum on another rank is waiting.
    """

    def __init__(self) -> None:
        self._times: deque[Times] = deque()
        self._comm_s: deque[float] = deque()
        self._samples: deque[int] = deque()
        self._about_s = 0.0
        """Seconds of all steps in the window, up to rounding errors. It is cheap to update in each step."""

    def add(self, times: Times, samples: int) -> None:
        """Add the times of a step. ``samples``: the global batch size of the step."""
        self._times.append(times)
        self._samples.append(samples)
        self._about_s += _step_s(times)
        while len(self._times) > MAX_WINDOW or (
            len(self._times) > MIN_WINDOW and self._about_s - _step_s(self._times[0]) >= WINDOW_S
        ):
            self._about_s -= _step_s(self._times.popleft())
            self._samples.popleft()

    def add_exposed(self, of_all_ranks: Sequence[float]) -> None:
        """Add ``exposed_s`` of all workers in the previous step, in seconds; the minimum counts as communication."""
        self._comm_s.append(min(of_all_ranks))
        while len(self._comm_s) > len(self._times):
            self._comm_s.popleft()

    @property
    def step_s(self) -> float:
        """Mean step time in seconds; 0 before the first step."""
        return self._spent_s / len(self._times) if self._times else 0.0

    @property
    def typical_s(self) -> float:
        """Median step time in seconds; 0 before the first step.

        Hang detection derives its deadline from the median, because a single long step must not extend the deadline.
        """
        return median(map(_step_s, self._times)) if self._times else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batches that all ranks together process per second; 0 before the first step."""
        spent_s = self._spent_s
        return sum(self._samples) / spent_s if spent_s else 0.0

    @property
    def _spent_s(self) -> float:
        return sum(map(_step_s, self._times))

    def measure(self, rank: int, device: str, share: int) -> RankMeasure:
        """Return the mean times of this rank for the run's report. ``share``: local batch size of the rank.

        Before the first step, the result contains no times.
        """
        if not self._times:
            return RankMeasure(rank=rank, device=device, share=share)
        mean = Times(*(sum(column) / len(self._times) for column in zip(*self._times, strict=True)))
        comm_s = min(mean.exposed_s, sum(self._comm_s) / len(self._comm_s)) if self._comm_s else mean.exposed_s
        return RankMeasure(
            rank=rank,
            device=device,
            share=share,
            compute_s=mean.compute_s,
            wait_s=mean.exposed_s - comm_s,
            comm_s=comm_s,
            data_s=mean.data_s,
            agree_s=mean.agree_s,
            wait_cpu_s=mean.exposed_cpu_s,
            fetch_s=mean.fetch_s,
            forward_s=mean.forward_s,
            backward_s=mean.backward_s,
            sum_s=mean.sum_s,
        )


def _step_s(times: Times) -> float:
    return times.data_s + times.compute_s + times.exposed_s
