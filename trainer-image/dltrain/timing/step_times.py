"""The parts of a rank's step times and their means.

Means are used instead of medians. Under a CPU quota, most steps run at full speed and a few pause for most of 100 ms;
the run time includes both.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from dlcontract import RankMeasure

MIN_WINDOW = 50
"""Smallest number of steps in a mean. It is few enough to follow changes of long steps."""
WINDOW_S = 10.0
"""Smallest number of seconds that the steps of a mean take together.

The means then span a hundred periods of a CPU quota, and loads of the machine that come and go within seconds."""
BLOCK_S = 0.5
"""Seconds of steps whose sums a window adds up in one block. The oldest block leaves the window as a whole."""


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


@dataclass
class _Block:
    """Sums over consecutive steps.

    ``comm_s``: communication of ``exchanged`` of these steps, those of which all ranks have exchanged the exposed time.
    """

    steps: int = 0
    times: Times = field(default_factory=lambda: Times(0.0, 0.0, 0.0))
    samples: int = 0
    comm_s: float = 0.0
    exchanged: int = 0


class Window:
    """The times of the last steps, with ``exposed_s`` divided into waiting and communication.

    The steps are at least ``MIN_WINDOW``, take at least ``WINDOW_S`` seconds together, and are at most one block more.
    There are fewer after the start, and after the local batch size of the rank has changed: only steps of its present
    size count.

    The slowest rank waits for no other rank. Its exposed time, the minimum over all ranks, is communication. Any excess
    over this minimum on another rank is waiting.
    """

    def __init__(self) -> None:
        self._blocks = deque([_Block()])
        self._last_s = deque[float](maxlen=MIN_WINDOW)
        self._share: int | None = None

    def add(self, times: Times, samples: int, share: int) -> None:
        """Add the times of a step. ``samples``: the global batch size of the step. ``share``: this rank's part."""
        if share != self._share:
            self._share, self._blocks = share, deque([_Block()])
        elif _step_s(self._blocks[-1].times) >= BLOCK_S:
            self._forget()
            self._blocks.append(_Block())
        block = self._blocks[-1]
        block.times = _sum(block.times, times)
        block.steps, block.samples = block.steps + 1, block.samples + samples
        self._last_s.append(_step_s(times))

    def _forget(self) -> None:
        """Remove the oldest blocks, as long as the other ones suffice."""
        steps, spent_s = sum(block.steps for block in self._blocks), sum(_step_s(block.times) for block in self._blocks)
        while True:
            steps, spent_s = steps - self._blocks[0].steps, spent_s - _step_s(self._blocks[0].times)
            if steps < MIN_WINDOW or spent_s < WINDOW_S:
                return
            self._blocks.popleft()

    def add_exposed(self, of_all_ranks: Sequence[float]) -> None:
        """Add ``exposed_s`` of all workers in the step before the last one; the minimum counts as communication.

        If that step is not in the window, do nothing.
        """
        if len(self._blocks) > 1 or self._blocks[0].steps > 1:
            self._blocks[-1].comm_s += min(of_all_ranks)
            self._blocks[-1].exchanged += 1

    @property
    def step_s(self) -> float:
        """Mean step time in seconds; 0 before the first step."""
        steps = sum(block.steps for block in self._blocks)
        return self._spent_s / steps if steps else 0.0

    @property
    def typical_s(self) -> float:
        """Median time in seconds of the last ``MIN_WINDOW`` steps; 0 before the first step.

        Hang detection derives its deadline from the median, because a single long step must not extend the deadline.
        """
        return median(self._last_s) if self._last_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batches that all ranks together process per second; 0 before the first step."""
        spent_s = self._spent_s
        return sum(block.samples for block in self._blocks) / spent_s if spent_s else 0.0

    @property
    def _spent_s(self) -> float:
        return sum(_step_s(block.times) for block in self._blocks)

    def measure(self, rank: int, device: str, share: int) -> RankMeasure:
        """Return the mean times of this rank for the run's report. ``share``: local batch size of the rank.

        Before the first step, the result contains no times.
        """
        steps = sum(block.steps for block in self._blocks)
        if not steps:
            return RankMeasure(rank=rank, device=device, share=share)
        mean = Times(*(sum(part) / steps for part in zip(*(block.times for block in self._blocks), strict=True)))
        exchanged = sum(block.exchanged for block in self._blocks)
        comm_s = mean.exposed_s
        if exchanged:
            comm_s = min(comm_s, sum(block.comm_s for block in self._blocks) / exchanged)
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


def _sum(a: Times, b: Times) -> Times:
    return Times(*(x + y for x, y in zip(a, b, strict=True)))


def _step_s(times: Times) -> float:
    return times.data_s + times.compute_s + times.exposed_s
