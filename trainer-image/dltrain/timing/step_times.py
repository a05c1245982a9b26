"""The parts of a rank's step times and their means.

Means are used instead of medians. Under a CPU quota, most steps run at full speed and a few pause for most of 100 ms;
the run time includes both.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from dlcontract import RankMeasure

WINDOW = 50
"""Number of steps in a mean: enough to span several periods of a CPU quota, and few enough to follow changes."""


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
    """The times of the last ``WINDOW`` steps, with ``exposed_s`` divided into waiting and communication.

    The slowest rank waits for no other rank. Its exposed time, the minimum over all ranks, is communication. Any excess
    over this minimum on another rank is waiting.
    """

    def __init__(self) -> None:
        self._times: deque[Times] = deque(maxlen=WINDOW)
        self._comm_s: deque[float] = deque(maxlen=WINDOW)
        self._samples: deque[int] = deque(maxlen=WINDOW)

    def add(self, times: Times, samples: int) -> None:
        """Add the times of a step. ``samples``: the global batch size of the step."""
        self._times.append(times)
        self._samples.append(samples)

    def add_exposed(self, of_all_ranks: Sequence[float]) -> None:
        """Add ``exposed_s`` of all workers in the previous step, in seconds; the minimum counts as communication."""
        self._comm_s.append(min(of_all_ranks))

    @property
    def step_s(self) -> float:
        """Mean step time in seconds; 0 before the first step."""
        return self._spent_s / len(self._times) if self._times else 0.0

    @property
    def typical_s(self) -> float:
        """Median step time in seconds; 0 before the first step.

        Hang detection derives its deadline from the median, because a single long step must not extend the deadline.
        """
        return median(t.data_s + t.compute_s + t.exposed_s for t in self._times) if self._times else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batches that all ranks together process per second; 0 before the first step."""
        spent_s = self._spent_s
        return sum(self._samples) / spent_s if spent_s else 0.0

    @property
    def _spent_s(self) -> float:
        return sum(t.data_s + t.compute_s + t.exposed_s for t in self._times)

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
