"""The part of the training API that describes the ranks and sets their local batch sizes."""

from collections.abc import Sequence

from dltrain.elastic.team import Team
from dltrain.parallel.data_parallel import DataParallel


class Ranks:
    """The ranks of a training: their numbers, their local batch sizes, and their parallelism strategy."""

    _team: Team
    step: int
    """Number of completed steps."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Return the local batch size of each rank, in the plan's order."""
        return self._team.shares

    @property
    def parallel(self) -> DataParallel:
        """Return the object that implements the plan's parallelism strategy. Raise MisuseError before ``wrap``."""
        return self._team.parallel

    @property
    def worker(self) -> int:
        """Return this rank's number among the workers, or among the servers if it is a parameter server."""
        return self._team.worker

    @property
    def workers(self) -> int:
        """Return the number of ranks that compute gradients."""
        return self._team.workers

    @property
    def alive(self) -> int:
        """Return the number of ranks that train: the planned ranks without those that are currently lost."""
        return len(self._team.elastic.alive)

    def reshard(self, shares: Sequence[int], reason: str) -> None:
        """Set the local batch sizes of all ranks from the next step on. Every rank must pass the same values.

        ``shares``: the local batch sizes, in the plan's order. ``reason``: text for the report of the change.
        """
        self._team.reshard(self.step, shares, reason)
