"""Tests that jobs in a queue of Kueue count in the ledger with their pods only, and are planned on empty nodes."""

from dataclasses import replace

import pytest

from dljob.cluster import Node
from dljob.job.reservation import PlannedPods, stored_reservation
from dljob.scheduling.ledger import BoundPod, Ledger, NodeCapacity
from dljob.scheduling.requests import Requests
from support.builders import planned, seen


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
