"""Tests that a restart of the operator does not affect a job, and that deletion needs no operator."""

import pytest

from support.cluster.kubectl import OWNED, TWO_NODES, Kubectl, example, step_of, wait_for

pytestmark = pytest.mark.e2e
SYSTEM = "dljob-system"


def operator(admin: Kubectl) -> Kubectl:
    return Kubectl(admin.kubeconfig, SYSTEM)


def operator_ready(admin: Kubectl) -> None:
    operator(admin).run(
        "rollout", "status", "deployment", "-l", "app.kubernetes.io/name=dljob", "--timeout=90s", timeout_s=100
    )


def test_restart_of_the_operator_does_not_affect_a_running_job(admin: Kubectl, kubectl: Kubectl) -> None:
    kubectl.apply(example("digits.yaml", job="steady", epochs=60, nodes=TWO_NODES))
    kubectl.wait_job("steady", "a step", lambda j: step_of(j) > 0, 120)
    before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in kubectl.list("pods", "dljob.dev/job=steady")}
    operator(admin).run("delete", "pod", "-l", "app.kubernetes.io/name=dljob", "--wait=true")
    operator_ready(admin)
    during = {p["metadata"]["name"]: p["metadata"]["uid"] for p in kubectl.list("pods", "dljob.dev/job=steady")}
    assert during.items() <= before.items(), "no pod was created again"
    done = kubectl.wait_phase("steady", "Complete", 240)
    assert done["status"]["result"]["accuracy"] >= 0.97
    assert (done["status"]["restarts"], done["status"]["plan"]["number"]) == (0, 1)


@pytest.mark.long
def test_job_can_be_deleted_while_the_operator_is_down(admin: Kubectl, kubectl: Kubectl) -> None:
    kubectl.apply(example("digits.yaml", job="orphan", epochs=2000))
    kubectl.wait_phase("orphan", "Running", 120)
    [deployment] = operator(admin).list("deployments", "app.kubernetes.io/name=dljob")
    name = deployment["metadata"]["name"]
    operator(admin).run("scale", "deployment", name, "--replicas=0")
    try:
        kubectl.delete("dljob", "orphan", "--wait=true")
        for kind in OWNED:
            wait_for(f"{kind} to go", lambda k=kind: not kubectl.list(k, "dljob.dev/job=orphan"), 65)  # type: ignore[misc]
    finally:
        operator(admin).run("scale", "deployment", name, "--replicas=1")
        operator_ready(admin)
