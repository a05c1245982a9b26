"""Find lost nodes: nodes on which pods run, but which are deleted, are NotReady or have never been seen.

Also list the nodes that take no pods, because they are NotReady or cordoned.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from dljob.kube.objects.trim import NodeSeen

MAX_NODES = 10_000
_FOREVER = datetime.fromtimestamp(0, UTC)


class LostNodes:
    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._missing: dict[str, datetime] = {}
        """Nodes on which pods run, but which do not exist, with the time when that was noticed."""
        self._removed: dict[str, None] = {}
        """Names of nodes that were deleted, oldest first."""
        self._closed: dict[str, str] = {}
        """Name of a node that takes no pods → the reason."""
        self.closed: tuple[str, ...] = ()
        """The nodes that take no pods, sorted, each with the reason, such as 'n1 (cordoned)'."""

    def added(self, node: NodeSeen) -> None:
        """Note that a node exists, so that it no longer counts as lost because it was missing or deleted."""
        self._removed.pop(node.name, None)
        self._missing.pop(node.name, None)
        why = "NotReady" if not node.ready else "cordoned" if not node.schedulable else ""
        self._close(node.name, why)

    def removed(self, name: str) -> None:
        """Note that a node was deleted."""
        self._close(name, "")
        self._removed[name] = None
        if len(self._removed) > MAX_NODES:
            del self._removed[next(iter(self._removed))]

    def _close(self, name: str, why: str) -> None:
        if self._closed.get(name, "") == why:
            return
        self._closed[name] = why
        if not why:
            del self._closed[name]
        self.closed = tuple(f"{each} ({self._closed[each]})" for each in sorted(self._closed))

    def among(self, used: Iterable[str], nodes: Mapping[str, NodeSeen]) -> dict[str, datetime]:
        """Return name → time of loss for each lost node among those named in ``used``. ``nodes``: the existing nodes.

        A node that is not ready counts as lost since its condition changed. A deleted node counts as lost since 1970,
        so that every waiting time is over. A node that this operator has never seen counts as lost since the first call
        that missed it, because the watch of nodes may lag behind.
        """
        lost: dict[str, datetime] = {}
        for name in used:
            node = nodes.get(name)
            if node is None and name in self._removed:
                lost[name] = _FOREVER
                continue
            if node is None:
                lost[name] = self._missing.setdefault(name, self._now())
                if len(self._missing) > MAX_NODES:
                    del self._missing[next(iter(self._missing))]
                continue
            if not node.ready:
                lost[name] = node.since
        return lost


def failed_nodes(lost: Mapping[str, datetime], nodes: Mapping[str, NodeSeen]) -> dict[str, datetime]:
    """Return name → time of loss for the lost nodes that have failed by themselves.

    These are the nodes that still exist and that nobody has cordoned, shut down or begun to remove. ``lost``: name →
    time of loss. ``nodes``: all nodes by name. If more than half of them are NotReady, return no node: the control
    plane or the network has failed, rather than these nodes.
    """
    if 2 * sum(not node.ready for node in nodes.values()) > len(nodes):
        return {}
    return {name: at for name, at in lost.items() if name in nodes and not nodes[name].leaving}
