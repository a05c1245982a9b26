"""Notice when capacity grows. A job that waits for capacity is planned again only then."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter

from dljob.cluster import ClusterView, Node

_FREE = ("free_devices", "free_cpu", "free_memory_nbytes", "free_pods")
_others = attrgetter(*(field.name for field in fields(Node) if field.name not in _FREE))
"""Function that returns the fields of a node that do not change with the pods on it."""


class Growth:
    """Counters of how often the capacity of each device type has grown.

    Capacity grows if a node of that type is new, has more free resources than in the view before, or has changed in
    another way (for example in its labels). Several such nodes in one view count once.
    """

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        self._nodes: dict[str, Node] = {}
        self._grown: Counter[str] = Counter()

    def look(self, view: ClusterView) -> None:
        """Compare a new view with the view before, and count growth."""
        if view is self._view:
            return
        nodes = {node.name: node for node in view.nodes}
        for device in {node.device for name, node in nodes.items() if _offers_more(self._nodes.get(name), node)}:
            self._grown[device] += 1
        self._view, self._nodes = view, nodes

    def count(self, matters: Callable[[str], bool]) -> int:
        """Return how often capacity has grown for the device types for which ``matters`` returns True.

        Callers compare it with an earlier value to see if a job that could use these types should be planned again.
        """
        return sum(number for device, number in self._grown.items() if matters(device))


def _offers_more(old: Node | None, new: Node) -> bool:
    """Return True if a node is new (``old`` is None), has more of a free resource, or differs in another field.

    Return False for the same node with the same or fewer free resources.
    """
    if old is new:
        return False
    if old is None or (
        new.free_devices > old.free_devices
        or new.free_cpu > old.free_cpu
        or new.free_memory_nbytes > old.free_memory_nbytes
    ):
        return True
    return bool(_others(old) != _others(new))
