"""Tests of an elastic torchrun script in real pods: a node is lost for long, and the script goes on with the other nodes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from support.cluster.kubectl import ROOT, Kubectl, condition, wait_for

pytestmark = pytest.mark.e2e
ENDLESS = [{"name": "EPOCHS", "value": "100000"}, {"name": "SAVE_EVERY", "value": "500"}]
"""Variables of the script: it never ends, and its checkpoints are many seconds apart, as those of real scripts."""


def elastic(name: str, **trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the example's ConfigMap and job, both called ``name``. ``trainer``: fields of spec.trainer."""
    script, job = yaml.safe_load_all((ROOT / "examples" / "torchrun-elastic.yaml").read_text())
    script["metadata"]["name"] = job["metadata"]["name"] = name
    job["spec"]["podTemplateOverrides"][0]["spec"]["volumes"][0]["configMap"]["name"] = name
    job["spec"]["trainer"] |= trainer
    return script, job


def running_on(ranks: int) -> Any:
    """Return a function that returns True for a job that runs on this number of its three ranks."""

    def holds(job: dict[str, Any]) -> bool:
        running = condition(job, "Running")
        if running is None or running["status"] != "True":
            return False
        return ("on 2 of 3 ranks" in running["message"]) == (ranks == 2)

    return holds


@contextmanager
def second_node_lost(admin: Kubectl, kubectl: Kubectl, job: str) -> Iterator[None]:
    """Delete the job's second pod, and let no pod onto its node meanwhile."""
    [pod] = [p for p in kubectl.list("pods", f"dljob.dev/job={job}") if p["metadata"]["name"].endswith("-1")]
    node = pod["spec"]["nodeName"]
    admin.run("cordon", node)
    try:
        kubectl.run("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        yield
    finally:
        admin.run("uncordon", node)


@pytest.fixture(autouse=True)
def free_nodes(admin: Kubectl) -> None:
    """Wait until no pod of other tests holds a processor: a job that finds two free nodes is planned for two."""

    def pods() -> str:
        return admin.run("get", "pods", "--all-namespaces", "--selector=dljob.dev/job", "--output=name")

    wait_for("the pods of other tests to be gone", lambda: not pods(), 120, pods)


@pytest.mark.long
def test_elastic_script_loses_a_node_goes_on_and_takes_it_back(admin: Kubectl, kubectl: Kubectl) -> None:
    kubectl.apply(*elastic("flexible", env=ENDLESS))
    kubectl.wait_job("flexible", "a plan", lambda job: bool(job.get("status", {}).get("plan")), 60)
    kubectl.wait_phase("flexible", "Running", 240)
    with second_node_lost(admin, kubectl, "flexible"):
        small = kubectl.wait_job("flexible", "two of three ranks", running_on(2), 240)
        assert small["status"]["restartsByCause"] == {"PodStopped": 1} and not small["status"].get("failures", 0)
    whole = kubectl.wait_job("flexible", "all ranks", running_on(3), 240)
    assert not whole["status"].get("failures", 0) and condition(whole, "WorldSizeRefused") is None
    kubectl.delete("dljob", "flexible")


@pytest.mark.long
def test_script_that_refuses_fewer_ranks_waits_for_the_lost_pod(admin: Kubectl, kubectl: Kubectl) -> None:
    script, job = elastic("stubborn", env=ENDLESS)
    source = script["data"]["train_elastic.py"]
    check = 'if dist.get_world_size() == 2:\n    raise ValueError("this script needs an odd number of ranks")\n'
    at = "torch.manual_seed(0)\n"
    assert source.count(at) == 1
    script["data"]["train_elastic.py"] = source.replace(at, check + at)
    kubectl.apply(script, job)
    kubectl.wait_phase("stubborn", "Running", 240)

    def refused(job: dict[str, Any]) -> bool:
        found = condition(job, "WorldSizeRefused")
        return found is not None and found["status"] == "True" and "odd number of ranks" in found["message"]

    with second_node_lost(admin, kubectl, "stubborn"):
        seen = kubectl.wait_job("stubborn", "WorldSizeRefused", refused, 240)
        assert not seen["status"].get("failures", 0)
    wait_for(
        "the job to go on with all ranks",
        lambda: kubectl.job("stubborn")["status"]["phase"] == "Running" and running_on(3)(kubectl.job("stubborn")),
        240,
        lambda: kubectl.describe_job("stubborn"),
    )
    kubectl.delete("dljob", "stubborn")
