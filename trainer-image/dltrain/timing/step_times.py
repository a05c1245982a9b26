"""Where a rank's time goes, step by step, and means of it.

Means, not medians, tell where time goes: under a CPU quota most steps run at full speed and a few stand still for most
of 100 ms, and it is both together that a run takes.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from dlcontract import RankMeasure

WINDOW = 50
"""Steps that a mean looks back on: several periods of a quota, and short enough to follow a change."""


class Times(NamedTuple):
    """One step of this rank, in seconds; together the step's time."""

    data_s: float
    """Waiting for the batch."""
    compute_s: float
    """Forward, backward and update."""
    exposed_s: float
    """Waiting for the sum after backward: for slower ranks, then for the network; and agreeing that all have it."""
    agree_s: float = 0.0
    """Of that, the agreement."""
    exposed_cpu_s: float = 0.0
    """CPU time of this process meanwhile, all of its threads."""
    fetch_s: float = 0.0
    """Making the batch, by whoever did: what of it is more than ``data_s`` was done beside other steps."""
    forward_s: float = 0.0
    """Of ``compute_s``: before backward and between its passes, the loss included."""
    backward_s: float = 0.0
    """Of ``compute_s``; what is left of it is the update. 0, as ``forward_s``: not told."""
    sum_s: float = 0.0
    """From the start of the step's first sum over ranks to the end of its last, most of it beside backward."""


class Window:
    """The last steps' times and what of ``exposed_s`` was waiting for others.

    The rank that came last did not wait for anybody: its exposed time, the least of all ranks', is the network's;
    what another rank spent beyond that was waiting.
    """

    def __init__(self) -> None:
        self._times: deque[Times] = deque(maxlen=WINDOW)
        self._comm_s: deque[float] = deque(maxlen=WINDOW)
        self._samples: deque[int] = deque(maxlen=WINDOW)

    def add(self, times: Times, samples: int) -> None:
        """A step of ``samples`` over all ranks."""
        self._times.append(times)
        self._samples.append(samples)

    def add_exposed(self, of_all_ranks: Sequence[float]) -> None:
        """Exposed time of every rank that computes, of the step before."""
        self._comm_s.append(min(of_all_ranks))

    @property
    def step_s(self) -> float:
        return self._spent_s / len(self._times) if self._times else 0.0

    @property
    def typical_s(self) -> float:
        """Median of the steps: what silence is held against, for one long step must not excuse ten."""
        return median(t.data_s + t.compute_s + t.exposed_s for t in self._times) if self._times else 0.0

    @property
    def samples_per_s(self) -> float:
        spent_s = self._spent_s
        return sum(self._samples) / spent_s if spent_s else 0.0

    @property
    def _spent_s(self) -> float:
        return sum(t.data_s + t.compute_s + t.exposed_s for t in self._times)

    def measure(self, rank: int, device: str, share: int) -> RankMeasure:
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
