"""Reductions that make progress only while a rank calls their methods ``test`` or ``wait``. They have no thread."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dltrain.comm.core.collective import Collective, Work
from dltrain.comm.core.waiting import LONGEST_LISTEN_S, Backoff

_AMONG_OTHERS_S = 1e-3
"""Maximum seconds between two polls of a reduction that is waited for while another reduction is pending."""


class Run(ABC):
    """The reduction of one buffer over ranks. The same object is started again in every step."""

    siblings: Sequence["Run"] = ()
    """The reductions of all buffers of the same collective, including this one."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Return True if the reduction that was started last is done, or if none was started yet."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """Return a number that changes whenever the reduction has made progress, because a message has arrived."""

    @abstractmethod
    def start(self) -> None:
        """Start a reduction. The previous one must be done."""

    @abstractmethod
    def close(self) -> None:
        """Free the MPI requests and the memory of this reduction. It cannot be started again."""

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking. Return True if the sum is in the buffer.

        Raise PeerLostError if a rank is lost.
        """

    def wait(self) -> None:
        """Block until the sum is in the buffer. Raise PeerLostError if a rank is lost."""
        backoff, seen = Backoff(), -1
        while not self.test():
            # Peers may need this rank's messages for another buffer before they reach this one.
            others = [run for run in self.siblings if run is not self and not run.finished]
            for run in others:
                run.test()
            if (
                backoff.listens and self.test()
            ):  # testing the others may have taken the message that would wake this rank
                return
            if (progress := sum(run.progress for run in self.siblings)) != seen:
                seen = progress
                backoff.progressed()
            # The last test may have taken messages of another run, so listen only briefly while other runs are pending.
            backoff.pause(_AMONG_OTHERS_S if others else LONGEST_LISTEN_S)


class Polled(Collective):
    """A collective that has one ``Run`` (the reduction of one buffer) for each buffer, in the order of the buffers."""

    runs: Sequence[Run] = ()

    def use_runs(self, runs: Sequence[Run]) -> None:
        """Set the reductions of this collective, one for each buffer, in the order of the buffers.

        While a rank waits for one of these ``runs``, it also makes progress on the others.
        """
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
