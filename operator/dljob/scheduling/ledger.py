"""The ledger of the cluster's capacity: what each node has, and what the pods that are bound to it request.

It is updated with each change of a node or pod, and recomputes only the nodes that a change concerns. Evaluating a list
of 4,000 pods on 500 nodes anew for each plan took 0.18 s.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dljob.cluster import ClusterView, Node
from dljob.scheduling.requests import NOTHING, Requests


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A node on which pods can be scheduled.

    ``node``: the node as a view shows it while no pod runs on it. ``total``: its allocatable resources. ``max_pods``:
    largest number of pods that it can run at the same time; None: unknown.
    """

    node: Node
    total: Requests
    max_pods: int | None = None


@dataclass(frozen=True, slots=True)
class BoundPod:
    """A pod that is bound to the node ``node``, and what it requests there.

    The requests count until the pod is gone or has ended, also while it terminates.
    """

    node: str
    requests: Requests


class Ledger:
    """Nodes by name and bound pods by uid.

    A pod may be added before its node. The pod counts as soon as the node is added.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, NodeCapacity] = {}
        self._pods: dict[str, BoundPod] = {}
        self._used: dict[str, Requests] = {}
        """Sum of the requests of all pods of a node; without nodes that have no pods."""
        self._numbers: Counter[str] = Counter()
        """Number of the pods of each node."""
        self._shown: dict[str, Node] = {}
        self._dirty: set[str] = set()
        """Names of nodes whose entry in ``_shown`` is out of date."""
        self._view: ClusterView | None = None
        self.version = 0
        """It increases with each change of a node or pod that may change what ``view`` returns.

        Callers compare it with an earlier value to see if a result is still valid.
        """

    def put_node(self, name: str, capacity: NodeCapacity | None) -> bool:
        """Add, update or remove a node. Return True if this changed the ledger.

        ``capacity``: None removes the node, because it is gone or no pods can be scheduled on it.
        """
        if self._nodes.get(name) == capacity:
            return False
        if capacity is None:
            del self._nodes[name]
        else:
            self._nodes[name] = capacity
        self._touch(name)
        return True

    def drop_node(self, name: str) -> bool:
        return self.put_node(name, None)

    def put_pod(self, uid: str, pod: BoundPod | None) -> bool:
        """Add, update or remove a pod. Return True if this changed the ledger.

        ``pod``: None removes the pod, because it is gone, has ended or has no node yet.
        """
        old = self._pods.get(uid)
        if old == pod:
            return False
        if old is not None:
            self._count(old.node, NOTHING - old.requests, -1)
        if pod is None:
            self._pods.pop(uid, None)
        else:
            self._pods[uid] = pod
            self._count(pod.node, pod.requests, 1)
        return True

    def drop_pod(self, uid: str) -> bool:
        return self.put_pod(uid, None)

    def has_node(self, name: str) -> bool:
        """Return True if the ledger has the capacity of a node."""
        return name in self._nodes

    def holds(self, uid: str) -> bool:
        """Return True if the pod is in the ledger: it is bound to a node, and takes resources there."""
        return uid in self._pods

    def bound(self, uid: str) -> BoundPod | None:
        """Return the node of a pod and what the pod takes there; None if the pod is not in the ledger."""
        return self._pods.get(uid)

    def requests(self, uid: str) -> Requests:
        """Return what the pod takes from its node; ``NOTHING`` if the pod is not in the ledger."""
        pod = self._pods.get(uid)
        return NOTHING if pod is None else pod.requests

    def total(self) -> Requests:
        """Return the sum of the allocatable resources of all nodes."""
        return sum((capacity.total for capacity in self._nodes.values()), NOTHING)

    def view(self, without: Iterable[str] = ()) -> ClusterView:
        """Return the nodes with their free resources. Pods with uids in ``without`` count as gone."""
        if self._dirty or self._view is None:
            self._refresh()
        assert self._view is not None
        freed: dict[str, Requests] = {}
        gone = Counter[str]()
        for uid in without:
            pod = self._pods.get(uid)
            if pod is not None and pod.node in self._shown:
                freed[pod.node] = freed.get(pod.node, NOTHING) + pod.requests
                gone[pod.node] += 1
        if not freed:
            return self._view
        return ClusterView(
            tuple(
                self._left(node.name, freed[node.name], gone[node.name]) if node.name in freed else node
                for node in self._view.nodes
            )
        )

    def empty_view(self) -> ClusterView:
        """Return the nodes as if no pod ran on them."""
        return ClusterView(tuple(_free(self._nodes[name], NOTHING, 0) for name in sorted(self._nodes)))

    def _left(self, name: str, freed: Requests = NOTHING, gone: int = 0) -> Node:
        """Return a node with the resources that its pods leave free.

        ``freed``: requests of those of its pods that count as gone. ``gone``: their number.
        """
        return _free(self._nodes[name], self._used.get(name, NOTHING) - freed, self._numbers[name] - gone)

    def _count(self, node: str, change: Requests, pods: int) -> None:
        self._numbers[node] += pods
        if not self._numbers[node]:
            del self._numbers[node]
        used = self._used.get(node, NOTHING) + change
        if used == NOTHING:
            self._used.pop(node, None)
        else:
            self._used[node] = used
        if node in self._nodes:
            self._touch(node)

    def _touch(self, node: str) -> None:
        self._dirty.add(node)
        self.version += 1

    def _refresh(self) -> None:
        for name in self._dirty:
            if name in self._nodes:
                self._shown[name] = self._left(name)
            else:
                self._shown.pop(name, None)
        self._dirty.clear()
        self._view = ClusterView(tuple(self._shown[name] for name in sorted(self._shown)))


def _free(capacity: NodeCapacity, used: Requests, pods: int) -> Node:
    """Return the node with the resources that ``used`` leaves free; 0 if the node is overcommitted.

    A node without GPUs always has one free device. Nothing is free on a node that runs as many pods as it can, because
    the scheduler places no other pod there. ``pods``: number of its pods.
    """
    node, left = capacity.node, capacity.total - used
    if capacity.max_pods is not None and pods >= capacity.max_pods:
        left = NOTHING
    return replace(
        node,
        free_devices=max(0, left.devices) if node.is_gpu else 1,
        free_cpu=max(0, left.cpu_m) / 1000,
        free_memory_nbytes=max(0, left.memory_nbytes),
        free_pods=None if capacity.max_pods is None else max(0, capacity.max_pods - pods),
    )
