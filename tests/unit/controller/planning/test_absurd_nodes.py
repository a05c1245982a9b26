"""Tests that nodes which take no pods, or report absurd capacity, cost no job its plan, and are named where it matters."""

from dljob.kube.kinds import NODE
from support.builders import T4
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster


def test_absurd_node_is_not_used_and_the_job_that_lacks_it_says_so() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.node("absurd", T4, 2**63 - 1)
        first = cluster.submit("first", **SPEC)
        await operator.watch(1.0)
        assert operator.planned(first) == "Planned"
        await cluster.bind(await cluster.create_pods(first), "n1", "n2")
        second = cluster.submit("second", second=1, **SPEC)
        await operator.watch()
        assert operator.planned(second) != "Planned"
        assert "node absurd" in operator.message(second, "Planned")
        cluster.node("absurd", T4, 1)  # Its device plugin was repaired.
        cluster.node("n3", T4, 1)
        await operator.watch()
        assert operator.planned(second) == "Planned"

    on_two_nodes(body)


def test_job_says_which_nodes_take_no_pods_if_it_lacks_nodes() -> None:
    """Fixed bug: the message counted the other nodes only, and a user looked for the missing one."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        await cluster.api.merge(NODE, None, "n2", {"spec": {"unschedulable": True}})
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        assert operator.planned(key) == "TooFewNodes" and "n2 (cordoned)" in operator.message(key, "Planned")
        gone = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-02T00:00:00Z"}
        await cluster.api.merge(NODE, None, "n2", {"spec": {"unschedulable": None}, "status": {"conditions": [gone]}})
        operator.queue.add(key)
        await operator.watch()
        assert "n2 (NotReady)" in operator.message(key, "Planned")
        cluster.node("n2", T4, 1)
        await operator.watch()
        assert operator.planned(key) == "Planned"

    on_two_nodes(body)
