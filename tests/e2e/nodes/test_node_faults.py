"""Tests that a job leaves a node whose device fails repeatedly, with a script that simulates the fault."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from support.cluster.kubectl import Kubectl, condition, example, step_of, wait_for

pytestmark = pytest.mark.e2e
FAULTS = 2
SCRIPT = f"""
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import dltrain

t = dltrain.init(batch=120, epochs=10)
digits = dltrain.data.load("digits")
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
faults = Path("/var/lib/dljob/checkpoints/simulated-faults")  # on the volume, which all pods of the job share
for x, y in t.steps(t.loader(digits)):
    if t.rank == 1 and t.step >= 2 and (n := len(faults.read_text()) if faults.exists() else 0) < {FAULTS}:
        faults.write_text("x" * (n + 1))
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    cross_entropy(model(x), y).backward()
    opt.step()
"""


@pytest.fixture
def forgiving(admin: Kubectl) -> Iterator[set[str]]:
    """Return a set for the names of nodes. Their faults are forgotten after the test."""
    names: set[str] = set()
    yield names
    patch = json.dumps({"data": dict.fromkeys(names)})
    admin.run("patch", "configmap", "dljob-node-faults", "-n", "dljob-system", "--type=merge", "-p", patch)


CONDITION = "GpuUnhealthy"
KILL_RANKS = """
import os, signal

def is_fork(pid):
    return b"dltrain.launch.zygote" in open(f"/proc/{pid}/cmdline", "rb").read()

def parent(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]

for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) != os.getpid() and is_fork(pid) and is_fork(parent(pid)):
        os.kill(int(pid), signal.SIGKILL)
"""
"""Program that kills the ranks of a pod, which are children of the zygote and have its command line."""


@pytest.fixture
def unhealthy(admin: Kubectl) -> Iterator[Callable[[str], None]]:
    """Return a function that sets a condition of a node, as node-problem-detector does. It is removed after the test."""
    nodes: list[str] = []

    def patch(node: str, fields: dict[str, str]) -> None:
        body = json.dumps({"status": {"conditions": [{"type": CONDITION} | fields]}})
        admin.run("patch", "node", node, "--subresource=status", "--type=strategic", "-p", body)

    def set_condition(node: str) -> None:
        nodes.append(node)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = {"reason": "XidError", "message": "simulated", "lastHeartbeatTime": now, "lastTransitionTime": now}
        patch(node, {"status": "True", **text})

    yield set_condition
    for node in nodes:
        patch(node, {"$patch": "delete"})


@pytest.mark.long
def test_condition_of_a_real_node_decides_on_a_killed_rank(kubectl: Kubectl, unhealthy: Callable[[str], None]) -> None:
    """Without the rule, the first failure would fail the job."""
    rule = {"action": "Ignore", "onNodeConditions": [{"type": CONDITION}]}
    policy = {"backoffLimit": 0, "failureRules": [rule]}
    kubectl.apply(example("digits.yaml", job="forgiven", epochs=3000, runPolicy=policy))
    kubectl.wait_job("forgiven", "a step", lambda job: step_of(job) > 0, 120)
    unhealthy(placed(kubectl, "dljob.dev/job=forgiven")[1])
    kubectl.run("exec", "forgiven-cpu-1", "-c", "trainer", "--", "python3", "-c", KILL_RANKS)
    once = {"RankKilled": 1}
    killed = kubectl.wait_job("forgiven", "a restart", lambda job: job["status"].get("restartsByCause") == once, 60)
    after = kubectl.wait_job("forgiven", "steps after it", lambda job: step_of(job) > step_of(killed), 120)
    assert (after["status"]["failures"], after["status"]["failuresIgnored"]) == (1, 1)
    kubectl.delete("dljob", "forgiven")


@pytest.mark.long
def test_job_moves_from_a_node_whose_device_fails_again(kubectl: Kubectl, forgiving: set[str]) -> None:
    changes = {
        "trainer": {"command": ["python", "-c", SCRIPT]},
        "model": {"hints": {"parameters": 650, "flopsPerSample": 4000}},
        "nodes": {"min": 2, "max": 2},
        "epochs": 10,
    }
    kubectl.apply(example("digits.yaml", job="faulty", **changes))
    pods = "dljob.dev/job=faulty"
    wait_for("two pods on nodes", lambda: len([p for p in placed(kubectl, pods) if p]) == 2, 60)
    bad = placed(kubectl, pods)[1]
    forgiving.add(bad)
    kubectl.wait_job("faulty", "NodeFaulty", lambda job: condition(job, "NodeFaulty") is not None, 120)
    done = kubectl.wait_phase("faulty", "Complete", 240)
    moved = condition(done, "NodeFaulty")
    assert moved is not None and (moved["status"], moved["reason"]) == ("False", "Replanned")
    assert any(bad in line["reason"] for line in done["status"]["plan"]["rejected"])
    assert done["status"]["restartsByCause"]["DeviceFailed"] == FAULTS


def placed(kubectl: Kubectl, selector: str) -> list[str]:
    """Return the nodes of the pods, in the order of the pods' names; empty for a pod without a node."""
    pods = sorted(kubectl.list("pods", selector), key=lambda pod: str(pod["metadata"]["name"]))
    return [pod["spec"].get("nodeName", "") for pod in pods]
