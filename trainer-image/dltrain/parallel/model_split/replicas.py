"""The replicas of a model that is split over ranks: data parallelism between them (hybrids).

With p ranks per replica, rank r has part r mod p of replica r // p. The ranks of a replica process its part of the
batch. The ranks with the same part, one of each replica, sum their gradients.
"""

from torch import Tensor

from dlcontract import Plan
from dltrain.batch.sampling import Part, Sampler
from dltrain.comm.algorithms.single_rank import SingleRank
from dltrain.comm.core.collective import Collective
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.selection import choose


class Replicas:
    """The replicas of a plan, as this rank sees them.

    ``count``: number of replicas. ``parts``: number of parts of each replica. ``index``: this rank's replica, and
    ``part``: its part of the model. ``own``: the ranks of this replica, in the order of their parts. ``peers``: the
    ranks with the same part, in the order of their replicas.
    """

    def __init__(self, plan: Plan, process_group: ProcessGroup) -> None:
        """Create the process groups. All ranks must call this together. Raise PeerLostError if a rank is lost."""
        self._plan, self.whole = plan, process_group
        self.count, self.parts = plan.replicas, plan.split_over
        self.index, self.part = divmod(process_group.rank, self.parts)
        ranks = range(process_group.size)
        self.own = process_group.split([rank // self.parts for rank in ranks])
        self.peers = process_group.split([rank % self.parts for rank in ranks])

    @property
    def host(self) -> str:
        """Return the host of the first rank of this replica."""
        return self._plan.ranks[self.index * self.parts].host

    @property
    def numbers_of_peers(self) -> tuple[int, ...]:
        """Return the numbers in the plan of the ranks with the same part as this rank."""
        return tuple(range(self.part, self.whole.size, self.parts))

    def batch(self, sampler: Sampler, step: int) -> Part:
        """Return the samples of a step's batch that this replica processes."""
        return sampler.part(step, [1] * self.count, self.index)

    def summing(self, buffers: list[Tensor]) -> Collective:
        """Return the collective that sums ``buffers`` over the ranks with the same part. They must call it together."""
        if self.count == 1:
            return SingleRank(buffers)
        plan = self._plan
        return choose(
            plan.collective,
            self.peers.comm,
            buffers,
            segment_nbytes=plan.segment_nbytes,
            host=plan.ranks[self.part].host,
        )

    def abandon(self) -> None:
        """Abort the operations in which ranks of this replica wait for this rank."""
        if self.count > 1:
            self.own.abandon()
