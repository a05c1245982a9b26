"""A sum that moves on only when it is polled, and waiting for it. Users: ``engine``, ``shared``, ``auto``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dltrain.comm.waiting import Backoff


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
    def test(self) -> bool:
        """Progress without blocking; True once the sum is in the buffer. Raises PeerLostError."""

    def wait(self) -> None:
        """Block until the sum is in the buffer. Raises PeerLostError."""
        backoff, seen = Backoff(), -1
        while not self.test():
            # Peers may wait for our part in another buffer's sum before they come to this one.
            for run in self.siblings:
                if run is not self and not run.finished:
                    run.test()
            if (progress := sum(run.progress for run in self.siblings)) != seen:
                seen = progress
                backoff.progressed()
            backoff.pause()
