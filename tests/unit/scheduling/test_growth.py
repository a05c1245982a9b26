"""Laws of growth: it is noticed exactly when a node has more to offer than before."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.scheduling import Growth

NODE = Node("n", "gpu", 4, 2, 16.0, 8.0, 2**33, is_gpu=True, labels={"zone": "a"})


def grown(*views: tuple[Node, ...], device: str = "gpu") -> int:
    """Return how often capacity grew from view to view after the first."""
    growth = Growth()
    growth.look(ClusterView(views[0]))
    begun = growth.count(lambda each: each == device)
    for nodes in views[1:]:
        growth.look(ClusterView(nodes))
    return growth.count(lambda each: each == device) - begun


@given(st.integers(0, 4), st.floats(0, 16), st.integers(0, 2**34))
def test_growth_is_more_of_any_resource(devices: int, cpu: float, memory: int) -> None:
    other = replace(NODE, free_devices=devices, free_cpu=cpu, free_memory_nbytes=memory)
    assert grown((NODE,), (other,)) == (devices > 2 or cpu > 8.0 or memory > 2**33)


def test_new_and_changed_nodes_are_growth() -> None:
    assert grown((NODE,), (NODE, replace(NODE, name="m"))) == 1
    assert grown((NODE,), (replace(NODE, labels={"zone": "b"}),)) == 1
    assert grown((replace(NODE, taints=(("a", "", "NoSchedule"),)),), (NODE,)) == 1


def test_fewer_nodes_are_no_growth() -> None:
    assert grown((NODE, replace(NODE, name="m")), (NODE,)) == 0
    assert grown((NODE,), (), (NODE,)) == 1, "the node came back"


def test_device_types_are_counted_apart() -> None:
    assert grown((NODE,), (NODE, replace(NODE, name="m", device="cpu")), device="gpu") == 0
