"""Tests of what a pod requests, counted as the scheduler of Kubernetes counts it."""

from typing import Any

import pytest

from dljob.scheduling import Requests, pod_requests

Json = dict[str, Any]
SIDECAR = {"restartPolicy": "Always"}


def container(name: str = "main", **requests: str) -> Json:
    return {"name": name, "resources": {"requests": requests}}


def state(name: str, actual: str, allocated: str) -> Json:
    return {"name": name, "allocatedResources": {"cpu": allocated}, "resources": {"requests": {"cpu": actual}}}


CASES: dict[str, tuple[Json, Json, int]] = {
    # name: (spec, status, expected thousandths of a core)
    "nothing": ({}, {}, 0),
    "containers are added": ({"containers": [container(cpu="500m"), container("b", cpu="0.25")]}, {}, 750),
    "an init container runs before": (
        {"containers": [container(cpu="1")], "initContainers": [container("i", cpu="1500m")]}, {}, 1500,
    ),
    "init containers run one after another": (
        {"containers": [container(cpu="1")], "initContainers": [container("i", cpu="1"), container("j", cpu="2")]}, {}, 2000,
    ),
    "a sidecar runs beside the containers": (
        {"containers": [container(cpu="1")], "initContainers": [container("s", cpu="500m") | SIDECAR]}, {}, 1500,
    ),
    "an init container runs beside the sidecars before it": (
        {
            "containers": [container(cpu="1")],
            "initContainers": [container("s", cpu="500m") | SIDECAR, container("i", cpu="2"), container("t", cpu="4") | SIDECAR],
        }, {}, 5500,
    ),
    "only the sidecars before it": (
        {"containers": [], "initContainers": [container("i", cpu="2"), container("s", cpu="500m") | SIDECAR]}, {}, 2000,
    ),
    "overhead is added": ({"containers": [container(cpu="1")], "overhead": {"cpu": "250m"}}, {}, 1250),
    "a request of the whole pod replaces the sum": (
        {
            "containers": [container(cpu="1")], "resources": {"requests": {"cpu": "3"}}, "overhead": {"cpu": "250m"},
        }, {}, 3250,
    ),
    "a container that shrinks counts until it has": (
        {"containers": [container(cpu="1")]}, {"containerStatuses": [state("main", "2", "1")]}, 2000,
    ),
    "a container that grows counts at once": (
        {"containers": [container(cpu="3")]}, {"containerStatuses": [state("main", "1", "1")]}, 3000,
    ),
    "a resize that is impossible does not count": (
        {"containers": [container(cpu="9")]},
        {
            "containerStatuses": [state("main", "1", "2")],
            "conditions": [{"type": "PodResizePending", "reason": "Infeasible", "status": "True"}],
        }, 2000,
    ),
    "quantities that are no numbers count as nothing": ({"containers": [container(cpu="x"), container("b", cpu="NaN")]}, {}, 0),
    "fractions are rounded up": ({"containers": [container(cpu="100n")]}, {}, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_cpu_is_counted_as_the_scheduler_counts(case: str) -> None:
    spec, status, expected = CASES[case]
    assert pod_requests(spec, status).cpu_m == expected


def test_all_resources_are_counted() -> None:
    whole = {"requests": {"nvidia.com/gpu": "9"}}
    spec = {
        "containers": [
            container(memory="1Gi", **{"nvidia.com/gpu": "2"}),
            container("b", memory="512Mi", **{"amd.com/gpu": "1", "example.com/other": "7"}),
        ],
        "resources": whole,
    }
    assert pod_requests(spec) == Requests(0, 3 * 2**29, 3), "a whole pod requests only CPU and memory"


def test_huge_amounts_are_bounded() -> None:
    found = pod_requests({"containers": [container(memory="1e999999999999", cpu="1e999999999999")]})
    assert found.memory_nbytes == 2**63 and found.cpu_m == 1000 * 2**63
    assert pod_requests({"containers": [container(memory="-1e999999999999")]}) == Requests()
