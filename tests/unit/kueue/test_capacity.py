"""Tests that jobs in a queue of Kueue count in the ledger with their pods only, and are planned on empty nodes.

The quotas of their namespace do not bound their plans, because Kueue decides when they run. Limit ranges do.
"""

from dataclasses import replace

import pytest

from dljob.cluster import Node
from dljob.job.plan.stored import StoredPlan
from dljob.job.queue import QUEUE_LABEL, KueueAccess
from dljob.job.reservation import PlannedPods, stored_reservation
from dljob.kube.kinds import CONFIG_MAP, DLJOB
from dljob.scheduling.ledger import BoundPod, Ledger, NodeCapacity
from dljob.scheduling.requests import Requests
from support.builders import planned, seen
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster


@pytest.mark.parametrize(
    ("queue", "admitted", "pods"),
    [("", None, 3), ("q", None, 0), ("q", "False", 0), ("q", "True", 3), ("", "False", 3)],
)
def test_waiting_job_reserves_nothing(queue: str, admitted: str | None, pods: int) -> None:
    conditions = [{"type": "Admitted", "status": admitted, "reason": "Queued"}] if admitted else []
    observed = seen()
    observed = replace(observed, job=replace(observed.job, queue=queue, status={"conditions": conditions}))
    found = stored_reservation(observed, PlannedPods.of(planned(seen())), lambda _: False)
    assert sum(item.nodes for item in found.reservations) == pods


def test_empty_view_shows_nodes_as_if_no_pod_ran() -> None:
    ledger = Ledger()
    ledger.put_node("n", NodeCapacity(Node("n", "cpu"), Requests(4000, 2**33, 0)))
    ledger.put_pod("p", BoundPod("n", Requests(3000, 2**32, 0)))
    assert [node.free_cpu for node in ledger.view().nodes] == [1.0]
    assert [node.free_cpu for node in ledger.empty_view().nodes] == [4.0]


@pytest.mark.parametrize("memory", [None, "1Gi"])
def test_limit_ranges_bound_the_plans_of_jobs_in_a_queue(memory: str | None) -> None:
    """Fixed bug: Kueue never admitted the job, or the API server rejected the pods that Kueue had admitted."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        operator.cache._queues = True
        operator.cache.kueue = KueueAccess("kueue.x-k8s.io/v1beta1")
        cluster.limit_range("team-a", min={"memory": "3Gi"})
        cluster.quota("team-a", pods="0")
        key = cluster.submit("first", **SPEC, **({"resources": {"memory": memory}} if memory else {}))
        await cluster.api.merge(DLJOB, *key, {"metadata": {"labels": {QUEUE_LABEL: "main"}}})
        await operator.watch()
        if memory:
            assert operator.planned(key) == "LimitRangeExceeded"
            cluster.limit_range("team-a", min={"memory": "1Gi"})
            await operator.watch()
            assert operator.planned(key) == "Planned"
            return
        assert operator.planned(key) == "Planned"
        plan = StoredPlan.parse((await cluster.api.get(CONFIG_MAP, "team-a", "first-plan"))["data"])
        assert plan.memory_nbytes == 3 * 2**30 and plan.charges is None

    on_two_nodes(body)
