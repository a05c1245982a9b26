"""The groups of a plan: its pods on one type of device, which one StatefulSet runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import dlcontract
from dljob.api import DLJobSpec
from dljob.cluster import quantity


@dataclass(frozen=True)
class PodGroup:
    """The pods of one group (``nodes`` pods of the plan on one type of device), which one StatefulSet runs.

    ``cpu_m``: CPU request of a pod in thousandths of a CPU. ``memory_nbytes``: its memory request in bytes.
    """

    name: str
    device: str
    is_gpu: bool
    nodes: int
    ranks_per_node: int
    cpu_m: int
    memory_nbytes: int

    @property
    def cores(self) -> int:
        """Return the number of threads that each rank starts: its whole CPUs of the pod's CPU request, at least 1."""
        return max(1, self.cpu_m // (1000 * self.ranks_per_node))


def threads(spec: DLJobSpec, group: PodGroup) -> int:
    """Return the number of threads with which each rank of a group on CPUs computes, as ``dltrain.host.cgroup`` does.

    It is the value of OMP_NUM_THREADS in the spec or else the rank's part of the lower of CPU request and CPU limit.
    """
    if (asked := spec.trainer.threads) is not None:
        return asked
    own = spec.resources
    cpus = [float(quantity(each)) for each in (own.cpu, own.cpu_limit) if each]
    if not own.cpu:
        cpus.append(group.cpu_m / 1000)
    return max(1, int(min(cpus) / group.ranks_per_node))


def ranks_by_group(plan: dlcontract.Plan) -> Iterator[tuple[str, list[dlcontract.Rank], int]]:
    """Yield the name, the ranks and the number of nodes of each group of the plan, in rank order."""
    for name, group in groupby(plan.ranks, lambda rank: rank.group):
        ranks = list(group)
        yield name, ranks, len({rank.pod for rank in ranks})
