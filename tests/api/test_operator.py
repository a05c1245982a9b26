"""Tests of the operator against a real API server, with the test in the role of the trainer."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlcontract import CheckpointMark, Failure, RunPhase
from dljob.controller.watches.kopf_settings import PAGE
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import OWNED, Kubectl, KubectlError, condition, no_pods, wait_for
from support.cluster.live_job import SPEC, Play
from support.cluster.operator_process import OperatorProcess
from support.operator_forks.forked_operator import ForkedOperator

pytestmark = pytest.mark.api
Json = dict[str, Any]
TEMPLATE_VALIDATION_MINOR = 34
"""The API server validates the pod template of a StatefulSet: seen on 1.34 and 1.36, and not yet on 1.30."""

ANY_OVERRIDE = {"dljob.dev/overrides": "all"}

BAD: dict[str, tuple[Json, str, str, tuple[str, ...]]] = {
    # name: (spec changes, condition, its reason, words of its message)
    "no such device": ({"devices": ["abacus"]}, "Planned", "NoSuchDevice", ("spec.devices", "abacus", "hollow")),
    "too few nodes": ({"nodes": {"min": 50, "max": 60}}, "Planned", "TooFewNodes", ("nodes.min", "50")),
    "no such class": (
        {"checkpoint": {"volume": {"storageClassName": "imaginary"}}},
        "VolumeReady", "StorageClassNotFound", ("storageClassName", "imaginary"),
    ),
    "no such claim": (
        {"checkpoint": {"volume": {"claimName": "nowhere"}}}, "VolumeReady", "ClaimNotFound", ("claimName", "nowhere"),
    ),
    "no such dataset claim": (
        {"dataset": {"uri": "pvc://nowhere/a.npz", "samples": 100}},
        "VolumeReady", "DatasetClaimNotFound", ("dataset.uri", "nowhere"),
    ),
    "bad override": (
        {"podTemplateOverrides": [{"manager": "me", "spec": {"restartPolicy": "Sometimes"}}]},
        "PodsReady", "ObjectRejected", ("StatefulSet", "Sometimes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_spec_is_reported_in_a_condition_and_an_event(case: str, play: Play) -> None:
    changes, kind, reason, words = BAD[case]
    name = case.replace(" ", "-")
    play.submit(name, ANY_OVERRIDE, **changes)
    play.until_reported(name, kind, reason, *words)
    assert not play.kubectl.list("pods", f"dljob.dev/job={name}")


def test_broken_jobs_do_not_block_others(play: Play, operator: OperatorProcess) -> None:
    play.submit("crooked", ANY_OVERRIDE, podTemplateOverrides=[{"manager": "me", "spec": {"dnsPolicy": "Whatever"}}])
    play.run("straight")
    play.finish("straight")
    # Older API servers accept such a StatefulSet and reject its pods.
    reason = "ObjectRejected" if play.kubectl.server_minor() >= TEMPLATE_VALIDATION_MINOR else "PodsRejected"
    play.until_reported("crooked", "PodsReady", reason, f"crooked-{play.device}", "Whatever")
    play.patch("crooked", podTemplateOverrides=[])
    play.until_ready("crooked")


def test_plan_only_runs_nothing(play: Play) -> None:
    play.submit("thought", planning={"mode": "PlanOnly"})
    job = play.kubectl.wait_phase("thought", "Planned", 30)
    assert job["status"]["plan"]["nodes"] == 2 and job["status"]["plan"]["candidates"]
    for kind in OWNED:
        assert not play.kubectl.list(kind, "dljob.dev/job=thought"), kind


def test_job_runs_from_start_to_end(play: Play) -> None:
    play.submit("whole")
    wait_for("pods", lambda: len(play.kubectl.list("pods", "dljob.dev/job=whole")) == 2, 10)
    play.until_ready("whole")
    play.report("whole", RunPhase.RUNNING, step=40, step_s=0.02, samples_per_s=3000.0, loss=0.5)
    job = play.kubectl.wait_phase("whole", "Running", 30)
    status = job["status"]
    assert status["progress"] == {"step": 40, "steps": 100, "percent": 40, "display": "40%", "loss": 0.5}
    assert status["remaining"].split()[0] == "1s" and status["eta"] and status["measured"]["stepSeconds"] == 0.02
    scale = json.loads(play.kubectl.run("get", "dljob", "whole", "--subresource=scale", "-o", "json"))
    assert scale["status"] == {"replicas": 2, "selector": "dljob.dev/job=whole"}, "autoscalers read both"
    shown = play.kubectl.run("get", "dljob", "whole").splitlines()
    assert "PROGRESS" in shown[0] and "40%" in shown[1] and "REMAINING" in shown[0]
    play.succeed("whole")
    play.kubectl.run("wait", "dljob/whole", "--for=condition=Complete", "--timeout=30s")
    done = play.finish("whole")
    assert done["status"]["result"]["accuracy"] == 0.98 and done["status"]["completionTime"]
    assert "remaining" not in done["status"]
    no_pods(play.kubectl, "whole", 20)
    play.kubectl.wait_events("whole", "Planned", "Running", "Complete")
    assert all(c.get("lastTransitionTime") for c in done["status"]["conditions"])


def test_failed_run_reports_its_reason(play: Play) -> None:
    play.run("sad")
    failure = Failure(
        reason="TrainingError",
        message="ValueError: no luck",
        rank=1,
        host="sad-1",
        exit_code=1,
        log_tail="Traceback ...",
    )
    play.report("sad", RunPhase.FAILED, failure=failure)
    play.until_reported("sad", "Failed", "TrainingError", "rank 1 on sad-1", "no luck", "Traceback", status="True")
    no_pods(play.kubectl, "sad", 20)


def test_invalid_report_is_ignored(play: Play) -> None:
    play.run("muddled")
    play.write_report("muddled", '{"schema": 1, "uid": "x", "step": -5}')
    job = play.until_reported("muddled", "ReportValid", "InvalidReport", "muddled-report")
    assert job["status"]["progress"]["step"] == 10, "the last valid progress is kept"
    play.report("muddled", RunPhase.RUNNING, step=50)
    play.kubectl.wait_job("muddled", "step 50", lambda j: j["status"]["progress"]["step"] == 50, 10)
    assert condition(play.kubectl.job("muddled"), "ReportValid")["status"] == "True"  # type: ignore[index]


def test_image_that_cannot_be_pulled_is_reported(play: Play, nodes: HollowNodes) -> None:
    nodes.unpullable |= {f"unpulled-{nodes.device}-{i}" for i in range(2)}
    play.submit("unpulled", trainer={"image": "example.invalid/none:1"})
    job = play.until_reported("unpulled", "PodsReady", "ImagePullFailed", "example.invalid/none:1", "imagePullSecrets")
    assert job["status"]["phase"] == "Starting"
    nodes.unpullable.clear()
    play.until_ready("unpulled")


def test_job_is_suspended_and_resumed(play: Play) -> None:
    play.run("pause", suspend=False)
    play.patch("pause", suspend=True)
    mark = CheckpointMark(step=10, unix_s=time.time())
    play.report("pause", RunPhase.STOPPED, last_checkpoint=mark)
    play.kubectl.wait_phase("pause", "Suspended", 30)
    no_pods(play.kubectl, "pause", 5)
    play.kubectl.wait_job("pause", "checkpoint", lambda j: j["status"].get("lastCheckpoint", {}).get("step") == 10, 5)
    play.patch("pause", suspend=False)
    play.until_ready("pause")
    play.report("pause", RunPhase.RUNNING)
    job = play.kubectl.wait_phase("pause", "Running", 30)
    assert job["status"]["plan"]["number"] == 1, "the plan is unchanged"


def test_job_created_suspended_creates_no_objects(play: Play) -> None:
    play.submit("asleep", suspend=True)
    play.kubectl.wait_phase("asleep", "Suspended", 30)
    assert not play.kubectl.list("statefulsets", "dljob.dev/job=asleep")


def test_changed_spec_stops_all_pods_first(play: Play) -> None:
    play.run("change")
    before = {p["metadata"]["uid"] for p in play.kubectl.list("pods", "dljob.dev/job=change")}
    env = [{"name": "A", "value": "b"}, {"name": "EMPTY", "value": ""}]
    play.patch("change", globalBatchSize=90, trainer={"env": env})
    play.kubectl.wait_job("change", "plan 2", lambda j: j["status"]["plan"]["number"] == 2, 30)
    play.until_ready("change")
    pods = play.kubectl.list("pods", "dljob.dev/job=change")
    assert before.isdisjoint(p["metadata"]["uid"] for p in pods)
    for pod in pods:
        found = {item["name"]: item.get("value", "") for item in pod["spec"]["containers"][0]["env"]}
        assert (found["A"], found["EMPTY"]) == ("b", "")
    assert play.plan("change").global_batch == 90


def test_job_fails_after_its_active_deadline(play: Play) -> None:
    play.run("late", runPolicy={"activeDeadlineSeconds": 8})
    play.until_reported("late", "Failed", "DeadlineExceeded", "activeDeadlineSeconds", status="True")


def gone(kubectl: Kubectl, job: str) -> Callable[[], bool]:
    return lambda: not any(kubectl.list(kind, f"dljob.dev/job={job}") for kind in OWNED)


def test_ttl_deletes_the_job_and_its_objects(play: Play) -> None:
    volume = {"volume": {"reclaimPolicy": "Delete", "size": "1Mi"}}
    play.submit("fleeting", checkpoint=volume, runPolicy={"ttlSecondsAfterFinished": 1})
    play.until_ready("fleeting")
    play.succeed("fleeting")  # the job is deleted within a second
    wait_for("the job to go", lambda: play.kubectl.get("dljob", "fleeting") is None, 20)
    wait_for("its objects to be deleted", gone(play.kubectl, "fleeting"), 30)


def test_name_can_be_reused_at_once(play: Play) -> None:
    for _ in range(2):
        play.run("phoenix")
        uid = play.kubectl.job("phoenix")["metadata"]["uid"]
        assert play.plan("phoenix").uid == uid
        play.kubectl.delete("dljob", "phoenix", "--wait=true")
    wait_for("its objects to be deleted", gone(play.kubectl, "phoenix"), 30)


def versions(kubectl: Kubectl, job: str) -> dict[tuple[str, str], str]:
    """Return the resourceVersion of the job and of its objects."""
    found = {
        (kind, item["metadata"]["name"]): item["metadata"]["resourceVersion"]
        for kind in OWNED
        for item in kubectl.list(kind, f"dljob.dev/job={job}")
    }
    return found | {("dljob", job): kubectl.job(job)["metadata"]["resourceVersion"]}


def counts(kubectl: Kubectl, job: str) -> list[tuple[str, int]]:
    """Return (reason, count) of every event of a job."""
    return [(event["reason"], event["count"]) for event in kubectl.events(job)]


def test_restarted_operator_writes_nothing(play: Play, operator: OperatorProcess) -> None:
    play.run("steady")
    wait_for("quiet", lambda: versions(play.kubectl, "steady") == versions(play.kubectl, "steady"), 10)
    play.kubectl.wait_events("steady", "Planned", "Running")
    before, events = versions(play.kubectl, "steady"), counts(play.kubectl, "steady")
    operator.stop(signal.SIGKILL)
    operator.start()
    jobs = play.kubectl.list("dljobs.dljob.dev")
    takes = sum((condition(job, "PodsReady") or {}).get("reason") != "ObjectRejected" for job in jobs)
    wait_for(
        "a look at every job", lambda: operator.metric('dljob_operator_reconciles_total{result="ok"}') >= takes, 40
    )
    assert versions(play.kubectl, "steady") == before
    assert counts(play.kubectl, "steady") == events
    play.finish("steady")


def test_restarted_operator_gets_ready_if_its_list_of_jobs_has_several_pages(
    play: Play, operator: OperatorProcess
) -> None:
    names = [f"page-{i}" for i in range(PAGE + 1)]
    for name in names:
        play.submit(name, suspend=True)
    try:
        operator.stop(signal.SIGKILL)
        operator.start()
    finally:
        play.kubectl.delete("dljobs", *names)


def test_job_can_be_deleted_while_the_operator_is_down(play: Play, operator: OperatorProcess) -> None:
    play.run("orphan")
    assert operator.stop() == 0, operator.log
    try:
        play.kubectl.delete("dljob", "orphan", "--wait=true")
        wait_for("its objects to be deleted", gone(play.kubectl, "orphan"), 30)
    finally:
        operator.start()


def test_operator_cancels_running_reconciles_at_shutdown(play: Play, tmp_path: Path) -> None:
    """Regression: kopf waited for them and raised their errors, so that a rejected object gave exit code 1."""
    operator = OperatorProcess(play.kubectl.kubeconfig, "default", tmp_path / "log", DLJOB_LOG_LEVEL="debug")
    operator.start()
    wait_for("it to lead", lambda: operator.metric("dljob_operator_leader") == 1, 25)
    assert operator.stop() == 0, operator.log
    assert "Hung tasks stopping is skipped: no tasks given" in operator.log


@pytest.mark.long
def test_second_operator_takes_over(play: Play, operator: OperatorProcess, tmp_path: Path) -> None:
    second = ForkedOperator(play.kubectl.kubeconfig, play.kubectl.namespace, tmp_path / "second", identity="two")
    second.start()
    try:
        play.run("handed-over")
        assert (operator.metric("dljob_operator_leader"), second.metric("dljob_operator_leader")) == (1, 0)
        operator.stop(signal.SIGKILL)
        wait_for("the second to lead", lambda: second.metric("dljob_operator_leader") == 1, 25)
        play.finish("handed-over")
    finally:
        second.stop()
        if not operator.running:
            operator.start()


def test_lost_node_is_fenced(play: Play, nodes: HollowNodes) -> None:
    play.run("survivor")
    pods = {p["metadata"]["name"]: p for p in play.kubectl.list("pods", "dljob.dev/job=survivor")}
    name = f"survivor-{nodes.device}-1"
    lost = pods[name]
    nodes.remove(lost["spec"]["nodeName"])

    def replaced() -> bool:
        pod = play.kubectl.get("pod", name)
        return pod is not None and pod["metadata"]["uid"] != lost["metadata"]["uid"]

    wait_for("the pod to be replaced", replaced, 30)
    assert play.plan("survivor").term >= 2, "agents on the lost node are fenced"
    play.until_ready("survivor")
    play.finish("survivor")


def test_kubectl_rejects_unknown_fields(play: Play) -> None:
    with pytest.raises(KubectlError, match="batchSize"):
        play.submit("refused", batchSize=3)


def test_repeated_events_are_counted(play: Play) -> None:
    """Two equal events are one event with a count."""
    play.run("twice")
    found = play.kubectl.wait_events("twice", "Planned")
    assert len(found) == 1 and found[0]["count"] == 1 and json.dumps(found[0]["source"])


@pytest.mark.long
def test_job_that_a_quota_blocks_releases_its_other_pods_and_starts_once_it_may(play: Play) -> None:
    """Fixed bug: under a quota of one pod, a job of two held that pod without limit.

    The quota shrinks while the job runs: nothing is stopped until a pod is lost and cannot be created again.
    """
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "one-pod"},
        "spec": {"hard": {"pods": "1"}},
    }
    play.submit("gang", scheduling={**SPEC["scheduling"], "startTimeout": "10s"})
    play.until_ready("gang")
    play.kubectl.apply(quota)
    wait_for(
        "the quota's status",
        lambda: "used" in (play.kubectl.get("resourcequota", "one-pod") or {}).get("status", {}),
        20,
    )
    pod = play.kubectl.list("pods", "dljob.dev/job=gang")[0]["metadata"]["name"]
    play.kubectl.delete("pod", pod)
    play.until_reported("gang", "Admitted", "StartTimedOut", "exceeded quota")
    no_pods(play.kubectl, "gang", 30)
    assert play.kubectl.job("gang")["status"]["startTimeouts"] >= 1
    play.until_reported("gang", "Planned", "QuotaExceeded", "ResourceQuota one-pod", "2 needed")
    play.kubectl.delete("resourcequota", "one-pod")
    play.until_ready("gang")
    play.kubectl.delete("dljob", "gang")
