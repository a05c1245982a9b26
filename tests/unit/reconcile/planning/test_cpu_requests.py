"""Tests of the CPUs that the pods of a plan request on nodes that other jobs use, too."""

from dataclasses import replace

import pytest

from dljob.cluster import ClusterView
from dljob.planner import Infeasible
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import decide
from support.builders import CONFIG, DIGITS, Json, nodes, seen


def request_m(view: ClusterView, **spec: object) -> int | str:
    """Return the CPU request of a one-node job in thousandths of a core, or the reason why it has no plan."""
    found = decide(parse_observed(seen(DIGITS | {"nodes": {"min": 1, "max": 1}} | spec, view)), CONFIG)
    if isinstance(found, Infeasible):
        return found.reason
    [cpu_m] = found.cpu_m.values()
    return cpu_m


def less(view: ClusterView, cpu: float) -> ClusterView:
    """Return the cluster after a pod with this request was placed on the node with the most free CPUs."""
    most = max(view.nodes, key=lambda node: node.free_cpu)
    taken = replace(most, free_cpu=most.free_cpu - cpu)
    return ClusterView(tuple(taken if node is most else node for node in view.nodes))


@pytest.mark.parametrize(
    ("cpu", "expected_m"),
    [(0.5, [250] * 6), (1, [500] * 6), (2, [1000] * 6), (4, [3000] * 3 + [1000] * 3)],
)
def test_jobs_do_not_shrink_each_other_but_wait(cpu: float, expected_m: list[int]) -> None:
    """Fixed bug: 20 jobs at once were given requests from 1 to 0.09 cores, for which no plan was priced.

    On larger nodes, the first jobs get as many whole cores as pay. The others get a core or wait.
    """
    view, requests = nodes({"name": "n", "count": 3, "cpu": cpu, "memory": "64Gi"}), []
    while isinstance(found := request_m(view), int):
        requests.append(found)
        view = less(view, found / 1000)
    assert found == "DeviceBusy"
    assert requests == expected_m


@pytest.mark.parametrize(
    ("free", "resources", "waits"),
    [
        (1.0, {}, False),
        (0.99, {}, True),
        (0.5, {"cpu": "500m"}, False),
        (0.4, {"cpu": "500m"}, True),
        (0.5, {"cpuLimit": "500m"}, False),
        (0.4, {"cpuLimit": "500m"}, True),
    ],
)  # fmt: skip
def test_job_waits_for_a_whole_cpu_unless_its_spec_says_less(free: float, resources: Json, waits: bool) -> None:
    view = nodes({"name": "n", "cpu": 2, "memory": "64Gi"})
    view = ClusterView(tuple(replace(node, free_cpu=free) for node in view.nodes))
    assert (request_m(view, resources=resources) == "DeviceBusy") is waits
