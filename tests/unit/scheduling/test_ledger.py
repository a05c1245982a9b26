"""Laws of the ledger: its view depends only on the nodes and pods that exist, not on how they came to be."""

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.scheduling import NOTHING, BoundPod, Ledger, NodeCapacity, Requests

NODES, PODS = ("n1", "n2", "n3"), ("p1", "p2", "p3", "p4")


def capacity(name: str, cpu_m: int, devices: int = 0) -> NodeCapacity:
    is_gpu = devices > 0
    shown = Node(
        name, "gpu" if is_gpu else "cpu", devices or 1, devices or 1, cpu_m / 1000, cpu_m / 1000, 2**30, is_gpu=is_gpu
    )
    return NodeCapacity(shown, Requests(cpu_m, 2**30, devices))


requests = st.builds(Requests, st.integers(0, 3000), st.integers(0, 2**31), st.integers(0, 4))
pods = st.none() | st.builds(BoundPod, st.sampled_from(NODES), requests)


@dataclass(frozen=True)
class PutPod:
    uid: str
    pod: BoundPod | None


@dataclass(frozen=True)
class PutNode:
    name: str
    capacity: NodeCapacity | None


@dataclass(frozen=True)
class Look:
    """Ask for the view, so that later operations meet a cached one."""


capacities = st.none() | st.tuples(st.integers(0, 4000), st.integers(0, 4))
operations = st.one_of(
    st.builds(PutPod, st.sampled_from(PODS), pods),
    st.builds(
        lambda name, size: PutNode(name, None if size is None else capacity(name, *size)),
        st.sampled_from(NODES),
        capacities,
    ),
    st.just(Look()),
)


def applied(history: list[PutPod | PutNode | Look]) -> Ledger:
    ledger = Ledger()
    for each in history:
        version, before = ledger.version, ledger.view()
        match each:
            case PutPod(uid, pod):
                ledger.put_pod(uid, pod)
            case PutNode(name, found):
                ledger.put_node(name, found)
        if ledger.version == version:
            assert ledger.view() is before, "an unchanged ledger computes nothing"
    return ledger


def from_scratch(history: list[PutPod | PutNode | Look], without: tuple[str, ...] = ()) -> ClusterView:
    """Compute the view from the last state of each node and pod."""
    nodes = {each.name: each.capacity for each in history if isinstance(each, PutNode)}
    last = {each.uid: each.pod for each in history if isinstance(each, PutPod)}
    shown: list[Node] = []
    for name, found in sorted(nodes.items()):
        if found is not None:
            used = [p.requests for uid, p in last.items() if p is not None and p.node == name and uid not in without]
            is_gpu, total = found.node.is_gpu, found.total
            free = total.devices - sum(r.devices for r in used)
            shown.append(
                Node(
                    name, found.node.device, found.node.devices, max(0, free) if is_gpu else 1, found.node.cpu,
                    max(0, total.cpu_m - sum(r.cpu_m for r in used)) / 1000,
                    max(0, total.memory_nbytes - sum(r.memory_nbytes for r in used)), is_gpu=is_gpu,
                )
            )  # fmt: skip
    return ClusterView(tuple(shown))


@given(st.lists(operations, max_size=30))
def test_view_equals_a_computation_from_scratch(history: list[PutPod | PutNode | Look]) -> None:
    assert applied(history).view() == from_scratch(history)


@given(st.lists(operations, max_size=20), st.sets(st.sampled_from(PODS)))
def test_view_without_some_pods_equals_one_without_them(history: list[PutPod | PutNode | Look], left: set[str]) -> None:
    ledger = applied(history)
    assert ledger.view(without=left) == from_scratch(history, tuple(left))
    assert ledger.view() == from_scratch(history), "the ledger itself has not changed"


@given(
    st.dictionaries(st.sampled_from(NODES), st.tuples(st.integers(0, 4000), st.integers(0, 4))),
    st.dictionaries(st.sampled_from(PODS), pods), st.data(),
)  # fmt: skip
def test_order_does_not_matter(
    nodes: dict[str, tuple[int, int]], bound: dict[str, BoundPod | None], data: st.DataObject
) -> None:
    history: list[PutPod | PutNode | Look] = [PutNode(name, capacity(name, *size)) for name, size in nodes.items()]
    history += [PutPod(uid, pod) for uid, pod in bound.items()]
    assert applied(data.draw(st.permutations(history))).view() == applied(history).view()


@given(st.lists(operations, max_size=30))
def test_nothing_is_negative_or_exceeds_the_total(history: list[PutPod | PutNode | Look]) -> None:
    for node in applied(history).view().nodes:
        assert (
            0 <= node.free_devices <= node.devices and 0 <= node.free_cpu <= node.cpu and node.free_memory_nbytes >= 0
        )


def test_pod_of_an_unknown_node_counts_when_the_node_comes() -> None:
    ledger = Ledger()
    ledger.put_pod("p1", BoundPod("n1", Requests(500)))
    assert ledger.view().nodes == () and ledger.version == 0
    ledger.put_node("n1", capacity("n1", 2000))
    assert [node.free_cpu for node in ledger.view().nodes] == [1.5]
    ledger.drop_node("n1")
    ledger.put_node("n1", capacity("n1", 3000))
    assert [node.free_cpu for node in ledger.view().nodes] == [2.5], "the node was away for a moment"
    ledger.drop_pod("p1")
    assert [node.free_cpu for node in ledger.view().nodes] == [3.0]


def test_unchanged_objects_change_nothing() -> None:
    ledger = Ledger()
    assert ledger.put_node("n1", capacity("n1", 2000)) and ledger.put_pod("p1", BoundPod("n1", NOTHING))
    version = ledger.version
    assert not ledger.put_node("n1", capacity("n1", 2000)) and not ledger.put_pod("p1", BoundPod("n1", NOTHING))
    assert not ledger.drop_pod("unknown") and not ledger.drop_node("unknown")
    assert ledger.version == version and ledger.holds("p1") and not ledger.holds("unknown")


def test_places_of_pods_that_count_as_gone_are_free() -> None:
    ledger = Ledger()
    ledger.put_node("n1", replace(capacity("n1", 2000), max_pods=2))
    for uid in ("p1", "p2"):
        ledger.put_pod(uid, BoundPod("n1", Requests(100)))
    assert ledger.view().nodes[0].free_cpu == 0 and ledger.empty_view().nodes[0].free_cpu == 2
    assert (ledger.view().nodes[0].free_pods, ledger.empty_view().nodes[0].free_pods) == (0, 2)
    assert ledger.view(["p1"]).nodes[0].free_cpu == 1.9 and ledger.view(["p1"]).nodes[0].free_pods == 1
    ledger.put_pod("p1", BoundPod("n2", Requests(100)))
    assert ledger.view().nodes[0].free_cpu == 1.9, "it is on another node now"
    ledger.put_pod("p3", BoundPod("n1", NOTHING))
    assert ledger.view().nodes[0].free_cpu == 0, "also a pod without requests takes a place"
    ledger.drop_pod("p2")
    assert ledger.view().nodes[0].free_cpu == 2
