"""The CPUs and the memory that the pods of a new plan request."""

from collections.abc import Iterable
from math import ceil

from dljob.cluster import Node
from dljob.planner import Group, Request
from dljob.planner.candidates.pools import room_cpu
from dljob.planner.types import Choice

BESIDE_RANK_NBYTES = 2**28
LEAST_NBYTES = 2**29
"""Memory in bytes of a pod, at least, if only the memory of its largest rank is predicted."""


def pod_memory(choice: Choice, least_nbytes: int) -> tuple[int, dict[str, int]]:
    """Return the memory request in bytes of the largest pods, and that of each group whose pods request less, by name.

    ``least_nbytes``: what each pod requests at least.
    """
    predicted = choice.prediction
    largest = predicted.host_memory_nbytes or max(LEAST_NBYTES, predicted.memory_nbytes + BESIDE_RANK_NBYTES)
    largest = max(least_nbytes, largest)
    of_groups = zip(choice.groups, predicted.pods_nbytes, strict=False)
    given = {group.name: max(least_nbytes, nbytes) for group, nbytes in of_groups}
    return largest, {name: nbytes for name, nbytes in given.items() if nbytes < largest}


def cpu_m(group: Group, nodes: Iterable[Node], request: Request) -> int:
    """Return the CPU request of a group's pods in thousandths of a core. ``nodes``: those that the job can use.

    The request is that of the spec or, if unset, what the plan needs, but at most ``room_cpu`` of a planned node. A
    rank starts a thread for each whole CPU of its part.
    """
    if request.cpu_per_pod:
        return max(1, ceil(1000 * request.cpu_per_pod))
    free = sorted((node for node in nodes if node.device == group.device), key=lambda node: -node.free_cpu)
    room = min((room_cpu(node.cpu, node.free_cpu) for node in free[: group.nodes]), default=0.0)
    needed_m = ceil(100 * group.cpu_per_pod) * 10
    return max(50, min(needed_m, int(100 * room) * 10))
