"""Tests that nothing is declared dead while other pods hold every processor of the cluster (hack/test starved)."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from support.cluster.kubectl import Kubectl, condition, example, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.starved]
Json = dict[str, Any]
JOBS = 10
STALE_S = 10.0
"""Most seconds from a job's report to a status that shows it."""
SPIN = "import os\nfor _ in range(2 * os.cpu_count()): os.fork() or exec('while True: pass')\nwhile True: pass"


@pytest.fixture
def burners(admin: Kubectl, kubectl: Kubectl) -> Iterator[list[str]]:
    """Pods without requests, one per node, which use all processor time that they get."""
    [operator] = Kubectl(admin.kubeconfig, "dljob-system").list("pods", "app.kubernetes.io/name=dljob")
    image = operator["spec"]["containers"][0]["image"]
    names = []
    for node in admin.list("nodes"):
        names.append(f"burner-{node['metadata']['name']}")
        container = {
            "name": "burner", "image": image, "imagePullPolicy": "Never", "command": ["python", "-c", SPIN],
            "securityContext": {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True,
                "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"},
            },
        }  # fmt: skip
        spec = {
            "nodeName": node["metadata"]["name"], "containers": [container], "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
        }  # fmt: skip
        kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": names[-1]}, "spec": spec})
    for name in names:
        kubectl.run("wait", "pod", name, "--for=condition=Ready", "--timeout=60s", timeout_s=70)
    yield names
    for name in names:
        kubectl.delete("pod", name, "--wait=false")


def written(body: Json, *, by_operator: bool) -> datetime | None:
    """Return when the operator last wrote an object's status, or when another client last wrote the object."""
    times = [
        datetime.fromisoformat(item["time"])
        for item in body["metadata"].get("managedFields", ())
        if (item["manager"] == "dljob-operator") is by_operator and (item.get("subresource") == "status") is by_operator
    ]
    return max(times, default=None)


def test_ten_jobs_complete_while_other_pods_hold_all_processors(
    admin: Kubectl, kubectl: Kubectl, burners: list[str]
) -> None:
    system = Kubectl(admin.kubeconfig, "dljob-system")
    [lease] = system.list("leases")
    [before] = system.list("pods", "app.kubernetes.io/name=dljob")
    jobs = [f"starved-{i}" for i in range(JOBS)]
    kubectl.apply(*(example("digits.yaml", job=name, nodes={"min": 1, "max": 1}, epochs=20) for name in jobs))
    stale: dict[str, float] = {}

    def all_ended() -> bool:
        found = {job["metadata"]["name"]: job for job in with_managed_fields(kubectl, "dljobs")}
        for body in with_managed_fields(kubectl, "configmaps"):
            name = body["metadata"]["name"].removesuffix("-report")
            reported, shown = written(body, by_operator=False), written(found.get(name, body), by_operator=True)
            if name in found and reported is not None and shown is not None and reported > shown:
                stale[name] = max(stale.get(name, 0.0), (datetime.now(UTC) - reported).total_seconds())
        return all(condition(found[name], "Complete") or condition(found[name], "Failed") for name in jobs)

    wait_for("all jobs to end", all_ended, 900, lambda: kubectl.run("get", "dljobs,pods", "-o", "wide"))
    ended = {name: kubectl.job(name) for name in jobs}
    assert {name: job["status"]["phase"] for name, job in ended.items()} == dict.fromkeys(jobs, "Complete")
    assert {name: job["status"].get("restarts", 0) for name, job in ended.items()} == dict.fromkeys(jobs, 0)
    assert max(stale.values(), default=0.0) <= STALE_S, stale
    [after] = system.list("pods", "app.kubernetes.io/name=dljob")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert restarts(after) == restarts(before)
    [renewed] = system.list("leases")
    assert renewed["spec"]["holderIdentity"] == lease["spec"]["holderIdentity"]


def restarts(pod: Json) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def with_managed_fields(kubectl: Kubectl, kind: str) -> list[Json]:
    items: list[Json] = json.loads(kubectl.run("get", kind, "-o", "json", "--show-managed-fields"))["items"]
    return items
