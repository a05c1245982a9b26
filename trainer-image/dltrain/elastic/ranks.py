"""The part of the training API that describes the ranks and sets their local batch sizes."""

from collections.abc import Sequence

from dltrain.batch.sampling import Part, Sampler
from dltrain.elastic.team import Team
from dltrain.parallel.placement import Strategy


class Ranks:
    """The properties of ``Trainer`` for the ranks: their numbers, local batch sizes and parallelism strategy."""

    _team: Team
    rank: int
    step: int
    """Number of completed steps."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Return the local batch size of each rank, in the plan's order."""
        return self._team.shares

    @property
    def parallel(self) -> Strategy:
        """Return the object that reduces gradients and splits model or optimizer as the plan's parallelism requires.

        Raise MisuseError before ``wrap``.
        """
        return self._team.parallel

    @property
    def worker(self) -> int:
        """Return this rank's number among the workers (ranks that compute gradients).

        On a parameter server, return its number among the servers.
        """
        return self._team.worker

    @property
    def workers(self) -> int:
        """Return the number of workers, the ranks that compute gradients, without ranks that were lost."""
        return self._team.workers

    @property
    def alive(self) -> int:
        """Return the number of ranks that train now: the planned ranks without those that were lost."""
        return len(self._team.elastic.alive)

    def collect(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of each worker, in the order of the workers. All workers must call this method together.

        If ranks are lost during the call, the result has the data of the remaining ranks.
        """
        return self._team.together(self.step, lambda: self._team.worker_group.collect(data))

    def _part(self, sampler: Sampler, step: int) -> Part:
        """Return this rank's samples of the batch of ``step``, counted from 0, with the present local batch sizes."""
        return self.parallel.part(sampler, step, self.shares, self.rank)

    def reshard(self, shares: Sequence[int], reason: str) -> None:
        """Set the local batch sizes of all ranks from the next step on. Every rank must pass the same values.

        ``shares``: the local batch sizes, in the plan's order. ``reason``: text for the message that reports the change
        to the agent.
        """
        self._team.reshard(self.step, shares, reason)
