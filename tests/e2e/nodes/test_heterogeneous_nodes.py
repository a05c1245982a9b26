"""Tests on heterogeneous nodes and on nodes with wrong labels, with real CPU quotas and pods and fake GPUs.

The cluster is the second one of hack/test: a node of device cpu-fast, two of cpu-slow and one with two fake A100.
"""

import json
import os
from typing import Any

import pytest

from devcluster.progress import Progress
from devcluster.providers import choose
from support.cluster.kubectl import Kubectl, condition, example

pytestmark = pytest.mark.heterogeneous
FAST, SLOW = ("digits-cnn", "cpu-fast"), ("digits-cnn", "cpu-slow")
A100 = "NVIDIA-A100-SXM4-40GB"


@pytest.fixture(scope="module")
def mixed(kubectl: Kubectl) -> dict[str, Any]:
    """Return a finished job on the fast and the slow nodes, with the nodes of its pods under ``nodes``."""
    kubectl.apply(example("digits.yaml", job="mixed", globalBatchSize=240, devices=["cpu-fast", "cpu-slow"]))
    kubectl.wait_phase("mixed", "Running", 120)
    pods = kubectl.list("pods", "dljob.dev/job=mixed")
    done = kubectl.wait_phase("mixed", "Complete", 240)
    return {**done, "nodes": sorted((pod["metadata"]["name"], pod["spec"]["nodeName"]) for pod in pods)}


def devices(job: dict[str, Any]) -> set[str]:
    """Return the device types of the job's plan."""
    return {group["device"] for group in job["status"]["plan"]["groups"]}


def has_begun(job: dict[str, Any]) -> bool:
    return (job.get("status", {}).get("progress") or {}).get("step", 0) > 100


def is_at_risk(job: dict[str, Any]) -> bool:
    found = condition(job, "DeadlineAtRisk")
    return found is not None and found["status"] == "True"


def test_pods_run_on_the_nodes_of_their_group(mixed: dict[str, Any]) -> None:
    assert mixed["nodes"][0] == ("mixed-cpu-fast-0", "n1")
    assert [pod for pod, _ in mixed["nodes"][1:]] == ["mixed-cpu-slow-0", "mixed-cpu-slow-1"]
    assert {node for _, node in mixed["nodes"][1:]} == {"n2", "n3"}


def test_shares_follow_device_speed_and_the_model_learns(mixed: dict[str, Any]) -> None:
    shares = {group["device"]: group["batchPerRank"] for group in mixed["status"]["plan"]["groups"]}
    (fast,), slow = shares["cpu-fast"], shares["cpu-slow"]
    assert fast + sum(slow) == 240
    assert fast > 2 * max(slow) > 0
    assert mixed["status"]["result"]["accuracy"] >= 0.97
    found = condition(mixed, "DeviceMismatch")
    assert found is None or found["status"] == "False"


def test_run_updates_the_profile_of_each_device_for_the_next_plan(mixed: dict[str, Any], kubectl: Kubectl) -> None:
    profiled = {p["spec"]["device"] for p in kubectl.list("dlprofiles") if p["spec"]["model"] == "digits-cnn"}
    assert profiled >= {"cpu-fast", "cpu-slow"}
    again = example("digits.yaml", job="again", globalBatchSize=240, devices=["cpu-fast", "cpu-slow"])
    again["spec"]["planning"] = {"mode": "PlanOnly"}
    kubectl.apply(again)
    plan = kubectl.wait_phase("again", "Planned", 30)["status"]["plan"]
    assert plan["predicted"]["basis"] == "profile"


@pytest.mark.long
def test_plan_contradicted_by_measurements_is_replaced(mixed: dict[str, Any], kubectl: Kubectl) -> None:
    """A wrong profile makes the slow device the fastest. The plan is replaced after a hundred steps."""
    profiles = {(p["spec"]["model"], p["spec"]["device"]): p for p in kubectl.list("dlprofiles")}
    believed = profiles[SLOW]
    # Twice as fast as the fast device, because the planner believes no time that is far from its estimate.
    fastest_s = min(point["seconds"] / point["batch"] for point in profiles[FAST]["status"]["compute"])
    point = {"batch": 120, "seconds": 60 * fastest_s, "observations": 1}
    believed["status"] |= {"compute": [point], "scaling": []}
    path = f"/apis/dljob.dev/v1alpha1/dlprofiles/{believed['metadata']['name']}/status"
    kubectl.run("replace", "--raw", path, "-f", "-", stdin=json.dumps(believed))

    job = example("digits.yaml", job="contradicted", devices=["cpu-fast", "cpu-slow"], nodes={"min": 1, "max": 1})
    job["spec"] |= {"globalBatchSize": 120, "steps": 1000}
    del job["spec"]["epochs"]
    kubectl.apply(job)
    kubectl.wait_phase("contradicted", "Running", 120)
    (pod,) = kubectl.list("pods", "dljob.dev/job=contradicted")
    assert pod["metadata"]["name"] == "contradicted-cpu-slow-0"

    def reason(job: dict[str, Any]) -> str | None:
        found = condition(job, "PlanContradicted")
        return found["reason"] if found else None

    moved = kubectl.wait_job("contradicted", "replanned", lambda job: reason(job) == "Replanned", 120)
    assert [group["device"] for group in moved["status"]["plan"]["groups"]] == ["cpu-fast"]
    events = kubectl.wait_events("contradicted", "SlowerThanPredicted", "Replanning", "Replanned")
    assert {event["type"] for event in events if event["reason"] == "SlowerThanPredicted"} == {"Warning"}
    saved = moved["status"]["lastCheckpoint"]["step"]
    done = kubectl.wait_phase("contradicted", "Complete", 240)
    assert done["status"]["result"]["steps"] == 1000 and saved >= 100
    assert done["status"]["result"]["accuracy"] >= 0.97


@pytest.mark.long
def test_job_leaves_a_device_that_becomes_slow_and_meets_its_deadline(mixed: dict[str, Any], kubectl: Kubectl) -> None:
    """The slow device uses the least energy and meets the deadline, until its node loses most of its CPUs.

    The training takes five minutes on it. With a quarter of the CPUs, the rest of it would take twenty. The fast device
    needs more energy, because hack/test gives it 60 idle watts, and the slow one none.
    """
    job = example("digits.yaml", job="hurried", devices=["cpu-fast", "cpu-slow"], nodes={"min": 1, "max": 1})
    objective = {"minimize": "Energy", "deadline": "11m"}
    job["spec"] |= {"globalBatchSize": 120, "steps": 2500, "objective": objective}
    del job["spec"]["epochs"]
    kubectl.apply(job)
    begun = kubectl.wait_job("hurried", "100 steps", has_begun, 240)
    assert devices(begun) == {"cpu-slow"} and not is_at_risk(begun)
    (pod,) = kubectl.list("pods", "dljob.dev/job=hurried")
    cluster = choose(None, os.environ["DLJOB_TEST_CLUSTER"], Progress(quiet=True))
    cluster.node("slow", pod["spec"]["nodeName"])
    try:
        kubectl.wait_job("hurried", "late", is_at_risk, 240)
        moved = kubectl.wait_job("hurried", "moved", lambda job: devices(job) == {"cpu-fast"}, 240)
        assert moved["status"]["lastCheckpoint"]["step"] >= 100
        done = kubectl.wait_phase("hurried", "Complete", 480)
    finally:
        cluster.node("heal", pod["spec"]["nodeName"])
    assert not is_at_risk(done)
    assert done["status"]["result"]["steps"] == 2500
    assert done["status"]["usage"]["energyJoules"] > 0


def test_fake_gpu_is_detected_and_updates_no_profile(kubectl: Kubectl) -> None:
    kubectl.apply(example("digits.yaml", job="pretender", devices=[A100], nodes={"min": 1, "max": 1}, epochs=5))
    done = kubectl.wait_phase("pretender", "Complete", 240)
    found = condition(done, "DeviceMismatch")
    assert found is not None and (found["status"], found["reason"]) == ("True", "DeviceMismatch")
    assert f"{A100} planned, cpu found" in found["message"]
    assert {event["type"] for event in kubectl.wait_events("pretender", "DeviceMismatch")} == {"Warning"}
    profiles = kubectl.list("dlprofiles")
    assert A100 not in {profile["spec"]["device"] for profile in profiles}
    assert "pretender" not in json.dumps(profiles)


def test_plan_only_shows_gpus(kubectl: Kubectl) -> None:
    job = example("digits.yaml", job="shown", devices=[A100], nodes={"min": 1, "max": 1})
    job["spec"]["planning"] = {"mode": "PlanOnly"}
    kubectl.apply(job)
    plan = kubectl.wait_phase("shown", "Planned", 30)["status"]["plan"]
    assert {group["device"] for group in plan["groups"]} == {A100}
    assert not kubectl.list("pods", "dljob.dev/job=shown")
