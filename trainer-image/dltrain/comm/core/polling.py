"""Sums that move on only when they are polled, and waiting for them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dltrain.comm.core.collective import Collective, Work
from dltrain.comm.core.waiting import LONGEST_LISTEN_S, Backoff

_AMONG_OTHERS_S = 1e-3
"""Longest pause while another sum is under way."""


class Run(ABC):
    """One buffer's sum, started again and again."""

    siblings: Sequence["Run"] = ()
    """All of the collective's, this one among them."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the last one started is done."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """A number that changes whenever something arrived."""

    @abstractmethod
    def start(self) -> None:
        """Begin a sum; the one before is done."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds."""

    @abstractmethod
    def test(self) -> bool:
        """Progress without blocking; True once the sum is in the buffer. Raises PeerLostError."""

    def wait(self) -> None:
        """Block until the sum is in the buffer. Raises PeerLostError."""
        backoff, seen = Backoff(), -1
        while not self.test():
            # Peers may wait for our part in another buffer's sum before they come to this one.
            others = [run for run in self.siblings if run is not self and not run.finished]
            for run in others:
                run.test()
            if backoff.listens and self.test():  # what a test of another one took for us rings no more
                return
            if (progress := sum(run.progress for run in self.siblings)) != seen:
                seen = progress
                backoff.progressed()
            # That last test may have taken what came for another one.
            backoff.pause(_AMONG_OTHERS_S if others else LONGEST_LISTEN_S)


class Polled(Collective):
    """A collective that is a ``Run`` for each buffer, in their order."""

    runs: Sequence[Run] = ()

    def take(self, runs: Sequence[Run]) -> None:
        """Use these, which wait for each other."""
        self.runs = runs
        for run in runs:
            run.siblings = runs

    def start(self, index: int) -> Work:
        self.runs[index].start()
        return self.runs[index]

    def close(self) -> None:
        for run in self.runs:
            run.close()
        self.runs = ()
