"""Where a rank's time goes, step by step, and medians of it. Users: ``loop``."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dljob.contract import RankMeasure

WINDOW = 50
"""Steps that a median looks back on: long enough to pass over a checkpoint, short enough to follow a change."""


@dataclass(frozen=True)
class Times:
    """One step of this rank, in seconds; together the step's time."""

    data_s: float
    compute_s: float
    """Forward, backward and update."""
    exposed_s: float
    """Waiting for the sum after backward: for slower ranks, then for the network."""


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
        return median(t.data_s + t.compute_s + t.exposed_s for t in self._times) if self._times else 0.0

    @property
    def samples_per_s(self) -> float:
        spent = sum(t.data_s + t.compute_s + t.exposed_s for t in self._times)
        return sum(self._samples) / spent if spent else 0.0

    def measure(self, rank: int, device: str, share: int) -> RankMeasure:
        if not self._times:
            return RankMeasure(rank=rank, device=device, share=share)
        exposed_s = median(t.exposed_s for t in self._times)
        comm_s = min(exposed_s, median(self._comm_s)) if self._comm_s else exposed_s
        return RankMeasure(
            rank=rank,
            device=device,
            share=share,
            compute_s=median(t.compute_s for t in self._times),
            wait_s=exposed_s - comm_s,
            comm_s=comm_s,
            data_s=median(t.data_s for t in self._times),
        )
