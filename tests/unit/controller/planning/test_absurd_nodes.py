"""Tests that a node which reports absurd capacity costs no job its plan, and is named where it matters."""

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
