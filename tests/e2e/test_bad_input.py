"""Tests of user errors, each of which gives one clear message with field, found value, expectation and remedy.

The API server rejects them at admission if it can. Otherwise, a condition and an event appear within 30 s.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.client.output.records import outputs_of, report_of
from support.cluster.command_line import dljob, started
from support.cluster.kubectl import (
    ONE_NODE,
    TWO_NODES,
    Kubectl,
    KubectlError,
    condition,
    example,
    no_pods,
    wait_for,
)

pytestmark = pytest.mark.e2e
WITHIN_S = 60.0
NO_TORCH = [{"name": "DLTRAIN_IMPORT_AHEAD", "value": "off"}]
"""Variables of pods whose script does not need torch. Its import takes 2.5 s of processor time in each pod."""

AT_ADMISSION: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown field": ({"batchSize": 32}, ("batchSize",)),
    "wrong type": ({"globalBatchSize": "many"}, ("globalBatchSize", "integer")),
    "zero batch": ({"globalBatchSize": 0}, ("globalBatchSize", "0", "1")),
    "unknown model": ({"model": {"name": "resnet-9000"}}, ("model.name", "resnet-9000", "digits-cnn")),
    "unknown collective": ({"collective": "Telepathy"}, ("collective", "Telepathy", "Ring")),
}

AFTER_ADMISSION: dict[str, tuple[dict[str, Any], str, str, tuple[str, ...]]] = {
    # name: (spec changes, condition type, its reason, words of its message)
    "min above max": ({"nodes": {"min": 4, "max": 2}}, "Accepted", "InvalidSpec", ("nodes", "lower min or raise max")),
    "batch smaller than ranks": ({"globalBatchSize": 2}, "Accepted", "InvalidSpec", ("globalBatchSize", "nodes.min")),
    "unknown device": ({"devices": ["abacus"]}, "Planned", "NoSuchDevice", ("devices", "abacus", "cpu")),
    "more nodes than there are": ({"nodes": {"min": 50, "max": 60}}, "Planned", "TooFewNodes", ("nodes.min", "50")),
    "volume class missing": (
        {"checkpoint": {"volume": {"storageClassName": "imaginary"}}},
        "VolumeReady", "StorageClassNotFound", ("storageClassName", "imaginary"),
    ),
    "dataset missing": (
        {"dataset": {"uri": "file:///nowhere/data.npz", "samples": 1000}},
        "Failed", "BadInput", ("dataset.uri", "/nowhere/data.npz"),
    ),
    "dataset on no host": (
        {"dataset": {"uri": "http://no-such-host.invalid/a.npz", "samples": 1000}},
        "PodsReady", "DatasetNotFetched", ("dataset.uri", "no-such-host.invalid"),
    ),
    "dataset without its Secret": (
        {"dataset": {"uri": "s3://corpus/a.npz", "samples": 1000, "secretName": "no-such-secret"}},
        "Accepted", "SecretNotUsable", ("no-such-secret", "dataset.secretName", "found no Secret"),
    ),
    "image that cannot be pulled": (
        {"trainer": {"image": "localhost/no-such-image:1", "imagePullPolicy": "IfNotPresent"}},
        "PodsReady", "ImagePullFailed", ("localhost/no-such-image:1",),
    ),
    "command that exits 1 at once": (
        {
            "model": {"hints": {"parameters": 1000, "flopsPerSample": 1000}},
            "trainer": {"command": ["python", "-c", "import sys; sys.exit('no such luck')"], "env": NO_TORCH},
            "runPolicy": {"backoffLimit": 0},
        },
        "Failed", "RankFailed", ("no such luck", "exit code 1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_ADMISSION)
def test_invalid_spec_is_rejected_at_admission(case: str, kubectl: Kubectl) -> None:
    changes, words = AT_ADMISSION[case]
    with pytest.raises(KubectlError) as refusal:
        kubectl.run("apply", "-f", "-", stdin=yaml.safe_dump(example("digits.yaml", job="refused", **changes)))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert kubectl.get("dljob", "refused") is None


LONG = {"dataset on no host"}  # Tests of fetching have it, too.


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.long] * (c in LONG)) for c in AFTER_ADMISSION])
def test_error_is_reported_in_a_condition_and_an_event(case: str, kubectl: Kubectl) -> None:
    changes, kind, reason, words = AFTER_ADMISSION[case]
    if kind in ("Failed", "PodsReady"):  # The others have no pods.
        changes = {"nodes": ONE_NODE, **changes}
    name = case.replace(" ", "-").lower()
    try:
        kubectl.apply(example("digits.yaml", job=name, **changes))
    except KubectlError as refusal:  # a server that evaluates CEL rejects it at once
        assert reason == "InvalidSpec" and all(word in str(refusal) for word in words), str(refusal)
        return

    def reported(job: dict[str, Any]) -> bool:
        found = condition(job, kind)
        return found is not None and found["reason"] == reason and all(w in found["message"] for w in words)

    kubectl.wait_job(name, f"{kind}/{reason} naming {words}", reported, WITHIN_S)
    wait_for(
        f"an event {reason} on {name}",
        lambda: [e for e in kubectl.list("events") if e["involvedObject"]["name"] == name and e["reason"] == reason],
        WITHIN_S,
    )
    kubectl.delete("dljob", name, "--wait=false")


def test_job_whose_rank_needs_more_memory_than_planned_gets_it_and_the_next_begins_with_it(
    admin: Kubectl, kubectl: Kubectl
) -> None:
    """The plan counts on a tiny model, but the script holds 900 MiB."""
    script = "import time; held = bytearray(b'x') * (900 << 20); time.sleep(2)"
    changes = {
        "model": {"hints": {"parameters": 1000, "flopsPerSample": 1000}},
        "trainer": {"command": ["python", "-c", script]},
        "checkpoint": {"enabled": False},
        "nodes": ONE_NODE,
    }
    kubectl.apply(example("digits.yaml", job="hungry", **changes))
    job = kubectl.wait_phase("hungry", "Complete", 120)
    found = condition(job, "MemoryExceeded")
    assert found is not None and found["reason"] == "Raised" and "The next job of this script" in found["message"]
    assert job["status"]["restartsByCause"]["OutOfMemory"] == 1
    kubectl.delete("dljob", "hungry")

    def measured() -> list[dict[str, Any]]:
        """Return the points of the script. Those of other tests in this namespace need less."""
        own = [each for each in admin.list("dlprofiles") if each["spec"].get("namespace") == kubectl.namespace]
        points = [point for each in own for point in each["status"].get("memory", ())]
        return [point for point in points if point.get("peakBytes", 0) > 900 << 20]

    [point] = wait_for("the memory of the script in its profile", measured, 30)
    # Besides the script, the pod runs the agent and a process that has imported torch, of about 350 MiB together.
    assert point["ranks"] == 1 and point["peakBytes"] < 1500 << 20, point
    assert point["sufficientBytes"] >= point["peakBytes"] and "insufficientBytes" not in point
    kubectl.apply(example("digits.yaml", job="sated", **changes))
    job = kubectl.wait_phase("sated", "Complete", 120)
    assert "measured in an earlier run" in job["status"]["plan"]["memory"]
    assert not job["status"].get("restartsByCause") and condition(job, "MemoryExceeded") is None
    kubectl.delete("dljob", "sated")


def test_output_of_ranks_outlives_the_pods(kubectl: Kubectl) -> None:
    """Fixed bug: when a job had ended, its pods and all their output were gone."""
    script = "print('a long story'); import sys; sys.exit('that ends badly')"
    changes = {
        "model": {"hints": {"parameters": 1000, "flopsPerSample": 1000}},
        "trainer": {"command": ["python", "-c", script], "env": NO_TORCH},
        "runPolicy": {"backoffLimit": 0},
        "nodes": TWO_NODES,
    }
    kubectl.apply(example("digits.yaml", job="story", **changes))
    job = kubectl.wait_phase("story", "Failed", 120)
    assert "that ends badly" in (condition(job, "Failed") or {})["message"], "kubectl describe shows the last lines"
    no_pods(kubectl, "story", 60)
    found = kubectl.get("configmap", "story-logs")
    assert found is not None
    outputs = outputs_of(found)
    # The agents end the other ranks when one has failed, and these may not have come as far.
    assert any("a long story" in text and "that ends badly" in text for text in outputs.values()), outputs
    document = json.loads(report_of(found, "json") or "")
    assert document["phase"] == "Failed" and "<html" in (report_of(found, "html") or "")
    kubectl.delete("dljob", "story", "--wait=true")
    wait_for("the logs to be deleted with the job", lambda: kubectl.get("configmap", "story-logs") is None, 60)


def test_output_outlives_the_pods_of_a_job_that_the_operator_ends(kubectl: Kubectl, tmp_path: Path) -> None:
    """The job has no volume, and its coordinator does not decide its end. ``dljob logs`` follows it from its start."""
    script = "print('a long story', flush=True); import signal; signal.pause()"
    changes = {
        "model": {"hints": {"parameters": 1000, "flopsPerSample": 1000}},
        "trainer": {"command": ["python", "-c", script], "env": NO_TORCH},
        "checkpoint": {"enabled": False},
        "nodes": TWO_NODES,
    }
    kubectl.apply(example("digits.yaml", job="late", **changes))
    following = started(kubectl, tmp_path / "log", "logs", "late", "--follow", "--namespace", kubectl.namespace)
    kubectl.wait_phase("late", "Running", 120)
    expected = {f"[rank {rank}] a long story" for rank in range(2)}
    wait_for("output", lambda: expected <= set((tmp_path / "log").read_text().splitlines()), 60)
    so_far = dljob(kubectl, "logs", "late", "--rank", "1", "--namespace", kubectl.namespace)
    assert (so_far.returncode, so_far.stdout) == (0, "a long story\n"), so_far.stderr
    patch = json.dumps({"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    kubectl.run("patch", "dljob", "late", "--type=merge", "-p", patch)
    job = kubectl.wait_phase("late", "Failed", 60)
    assert (condition(job, "Failed") or {})["reason"] == "DeadlineExceeded"
    no_pods(kubectl, "late", 90)
    found = kubectl.get("configmap", "late-logs")
    assert found is not None
    assert outputs_of(found) == dict.fromkeys(range(2), "a long story\n")
    assert json.loads(report_of(found, "json") or "")["phase"] == "Stopped"
    assert following.wait(60) == 0 and "dljob: phase Failed" in (tmp_path / "log").read_text()
    kubectl.delete("dljob", "late")


def test_other_jobs_and_the_operator_keep_running(admin: Kubectl, kubectl: Kubectl) -> None:
    """This test runs after the tests above with the same operator."""
    kubectl.apply(example("digits.yaml", job="healthy", epochs=2, nodes=TWO_NODES))
    kubectl.wait_phase("healthy", "Complete", 180)
    [pod] = Kubectl(admin.kubeconfig, "dljob-system").list("pods", "app.kubernetes.io/name=dljob")
    assert [c["restartCount"] for c in pod["status"]["containerStatuses"]] == [0]
