"""Tests of ranks and pods that end at their memory limit: they count, and their job gets more memory."""

from dataclasses import replace
from typing import Any

import pytest

from dlcontract import Failure, RunPhase
from dljob.job.observed import Observed
from dljob.kube.objects.trim import pod as trimmed
from dljob.reconcile import needs_view, parse_observed
from support.builders import CPUS, DIGITS, MIXED, Json, after, changed, nodes, plan_of, report, seen, settled
from support.job_lifecycle import condition_of, started, status, step, training, verdict

LARGE = nodes({"name": "n", "count": 3, "cpu": 2, "memory": "64Gi"})
OUT_OF_MEMORY = {"reason": "OutOfMemory", "message": "rank 1 was killed", "rank": 1, "host": "digits-cpu-1"}

LATE = "2026-03-01T12:00:05Z"
SAME_MEMORY: tuple[Json, ...] = (
    {"epochs": 9}, {"nodes": {"min": 2, "max": 4}}, {"nodes": {"min": 2, "max": 2}}, {"checkpoint": {"keep": 2}},
    {"runPolicy": {"backoffLimit": 8}}, {"resources": {"cpu": "1"}},
)  # fmt: skip
OTHER_MEMORY: tuple[Json, ...] = (
    {"trainer": {"env": [{"name": "A", "value": "1"}]}}, {"precision": "BF16"}, {"resources": {"memory": "1Gi"}},
    {"trainer": {"image": "registry.example/mine:1"}},
)  # fmt: skip


def killed(observed: Observed, at: str = "2026-03-01T12:00:00Z") -> Observed:
    """Return the job after the kernel ended the container of its second pod, as with cgroup v2."""
    pods = [replace(pod, memory_killed_at=at) if pod.name == "digits-cpu-1" else pod for pod in observed.pods]
    return replace(observed, pods=tuple(pods))


def reported(observed: Observed, times: int = 1, exit_code: int = 137) -> Observed:
    """Return the job after its coordinator reported that the kernel ended a rank, as with cgroup v1."""
    failure = Failure(**OUT_OF_MEMORY, exit_code=exit_code)
    counts = {"failures": times, "restarts": {"OutOfMemory": times}, "failure": failure}
    return replace(observed, report=report(observed, RunPhase.RESTARTING, **counts))


def replaced(observed: Observed) -> Observed:
    """Return the job after its pods stopped for another plan, and those of this plan started."""
    observed = after(observed, step(observed))
    assert all(item.replicas == 0 for item in observed.sets), "the pods stop before others start"
    observed = replace(observed, pods=())
    return settled(after(observed, step(observed)))


@pytest.mark.parametrize("end", [killed, reported])
def test_pods_that_reach_their_limit_get_twice_the_memory(end: Any) -> None:
    observed = end(replace(training(), view=LARGE))
    before = plan_of(observed)
    first = step(observed)
    assert verdict(first, "MemoryExceeded") == ("True", "Raising")
    assert status(first).failures == 1 and first.requeue_after_s == 0.0
    observed = after(observed, first)
    assert needs_view(observed)
    observed = replaced(observed)
    now = plan_of(observed)
    assert now.memory_nbytes == 2 * before.memory_nbytes
    assert now.plan.digest() == before.plan.digest(), "the ranks train as before"
    observed = replace(observed, report=report(observed, failures=1, restarts={"OutOfMemory": 1}))
    again = step(observed)
    assert verdict(again, "MemoryExceeded") == ("True", "Raised")
    assert f"spec.resources.memory: {-(-now.memory_nbytes >> 20)}Mi" in condition_of(again, "MemoryExceeded").message
    assert not again.scales and not needs_view(after(observed, again))
    assert len([event for event in first.events if event.reason == "PodOutOfMemory"]) == (end is killed)


def test_the_second_end_raises_the_memory_again() -> None:
    observed = replace(training({**DIGITS, "runPolicy": {"backoffLimit": 9}}), view=LARGE)
    least = plan_of(observed).memory_nbytes
    for n in (1, 2, 3):
        observed = reported(observed, n)
        observed = replaced(after(observed, step(observed)))
        assert plan_of(observed).memory_nbytes == 2**n * least
    for same in SAME_MEMORY:
        assert parse_observed(changed(observed, **same)).memory_to_try == (8 * least,)
    for other in OTHER_MEMORY:
        assert parse_observed(changed(observed, **other)).memory_to_try == (), "a changed spec may need less"


@pytest.mark.parametrize("same", SAME_MEMORY)
def test_raised_memory_outlasts_pods_and_changes_that_leave_alone_what_ranks_compute(same: Json) -> None:
    """Regression: the pods of the changed spec had too little memory again, at once or after the next stop."""
    observed = reported(replace(training(), view=LARGE))
    least = plan_of(observed).memory_nbytes
    observed = replaced(after(observed, step(observed)))
    observed = changed(replace(observed, report=report(observed)), **same)
    observed = after(observed, step(observed))
    observed = after(changed(observed, suspend=True), step(changed(observed, suspend=True)))
    observed = changed(replace(observed, pods=()), suspend=False)
    for _ in range(2):
        observed = settled(after(observed, step(observed)))
    assert plan_of(observed).spec_digest == parse_observed(observed).digest
    assert plan_of(observed).memory_nbytes == 2 * least
    assert verdict(step(observed), "MemoryExceeded") == ("True", "Raised")


def test_a_change_right_after_the_end_of_a_rank_does_not_forget_it() -> None:
    """Regression: the pods of the changed spec had as little memory, and had to reach their limit once more."""
    observed = reported(replace(training(), view=LARGE))
    least = plan_of(observed).memory_nbytes
    observed = replaced(changed(after(observed, step(observed)), epochs=9))
    record = plan_of(observed).failures
    assert plan_of(observed).memory_nbytes == 2 * least
    assert record is not None and (record.memory_kills, record.memory_answered) == (1, 1)
    assert plan_of(observed).replans == 0, "it is the first plan of the changed spec"
    assert verdict(step(observed), "MemoryExceeded") == ("True", "Raised")


def test_a_change_takes_effect_although_no_node_has_more_memory() -> None:
    observed = training()
    full = nodes({"name": "n", "count": 3, "cpu": 2, "memory": str(plan_of(observed).memory_nbytes)})
    observed = reported(replace(observed, view=full))
    least = plan_of(observed).memory_nbytes
    observed = replaced(changed(after(observed, step(observed)), epochs=9))
    assert plan_of(observed).spec_digest == parse_observed(observed).digest
    assert plan_of(observed).memory_nbytes <= least
    assert verdict(step(observed), "MemoryExceeded") == ("True", "CannotRaise")


def test_pods_with_raised_memory_run_on_after_a_change_with_which_they_would_be_the_same() -> None:
    """They keep their requests of CPUs, which depend on what other pods leave free."""
    observed = reported(replace(training(), view=LARGE))
    observed = replaced(after(observed, step(observed)))
    now = plan_of(observed)
    roomy = nodes({"name": "n", "count": 3, "cpu": 4, "memory": "64Gi"})
    observed = changed(replace(observed, report=report(observed), view=roomy), nodes={"min": 3, "max": 4})
    observed = after(observed, desired := step(observed))
    assert not desired.scales and plan_of(observed).cpu_m == now.cpu_m


def test_a_node_with_little_more_gives_what_it_has() -> None:
    observed = training()
    least = plan_of(observed).memory_nbytes
    room = nodes({"name": "n", "count": 3, "cpu": 2, "memory": str(int(1.6 * least))})
    observed = reported(replace(observed, view=room))
    observed = replaced(after(observed, step(observed)))
    assert plan_of(observed).memory_nbytes == pytest.approx(1.5 * least, abs=2)


def test_job_stays_if_no_node_has_more_memory() -> None:
    observed = training()
    full = nodes({"name": "n", "count": 3, "cpu": 2, "memory": str(plan_of(observed).memory_nbytes)})
    observed = reported(replace(observed, view=full))
    observed = after(observed, step(observed))
    desired = step(observed)
    assert verdict(desired, "MemoryExceeded") == ("True", "CannotRaise") and not desired.scales
    message = condition_of(desired, "MemoryExceeded").message
    assert "no plan gives pods at least" in message and "of memory, but a pod needs" in message
    observed = after(observed, desired)
    assert not needs_view(observed), "it is planned once for each end"
    assert condition_of(step(observed), "MemoryExceeded").message == message
    again = reported(observed, 2)
    assert needs_view(after(again, step(again))), "the next end is another attempt"


@pytest.mark.parametrize("end", [killed, reported])
def test_memory_of_the_spec_is_not_changed(end: Any) -> None:
    observed = end(training({**DIGITS, "resources": {"memory": "1Gi"}}))
    desired = step(observed)
    assert verdict(desired, "MemoryExceeded") == ("True", "MemoryTooSmall")
    assert "spec.resources.memory: 1Gi" in condition_of(desired, "MemoryExceeded").message
    observed = after(observed, desired)
    assert not needs_view(observed) and not step(observed).scales
    larger = changed(observed, resources={"memory": "2Gi"})
    larger = replaced(replace(larger, view=CPUS))
    assert verdict(step(larger), "MemoryExceeded") == ("False", "SpecChanged")


def test_ends_of_pods_fail_the_job_after_the_limit() -> None:
    """Regression: the coordinator takes such a pod for lost, so that the job restarted for ever."""
    observed = training({**DIGITS, "resources": {"memory": "1Gi"}, "runPolicy": {"backoffLimit": 2}})
    for n in (1, 2):
        observed = killed(observed, f"2026-03-01T12:0{n}:00Z")
        desired = step(observed)
        assert status(desired).failures == n
        observed = after(observed, desired)
        assert status(step(observed)).failures == n, "it is counted once"
    failed = condition_of(step(killed(observed, "2026-03-01T12:03:00Z")), "Failed")
    assert (failed.status.value, failed.reason) == ("True", "OutOfMemory")
    assert "pods ended 3 times" in failed.message and "spec.resources.memory: 1Gi" in failed.message


def test_ends_of_pods_and_failures_count_together() -> None:
    observed = training({**DIGITS, "resources": {"memory": "1Gi"}, "runPolicy": {"backoffLimit": 1}})
    observed = after(killed(observed), step(killed(observed)))
    failed = condition_of(step(replace(observed, report=report(observed, failures=1))), "Failed")
    assert failed.reason == "OutOfMemory" and "1 times" in failed.message and "1 other failures" in failed.message


@pytest.mark.parametrize("gpus", [False, True])
def test_the_end_of_a_rank_is_noticed_although_the_report_names_a_later_failure(*, gpus: bool) -> None:
    """Regression: the operator did not see the report about the end, but only the next one.

    On GPUs, the rank may have lacked memory of its GPU.
    """
    failure = Failure(reason="NodeLost", message="lost contact", host="digits-cpu-1", counts=False)
    counts = {"failures": 1, "restarts": {"OutOfMemory": 1, "NodeLost": 1}, "failure": failure}
    observed = started({**DIGITS, "nodes": {"min": 2, "max": 2}}, view=MIXED if gpus else LARGE)
    observed = replace(observed, report=report(observed))
    observed = after(observed, step(observed))
    desired = step(replace(observed, report=report(observed, RunPhase.RESTARTING, **counts)))
    if gpus:
        assert all(c.type != "MemoryExceeded" for c in status(desired).conditions)
        return
    assert verdict(desired, "MemoryExceeded") == ("True", "Raising")
    assert "a rank ended at the memory limit" in condition_of(desired, "MemoryExceeded").message


def test_the_end_of_a_rank_that_makes_the_job_fail_is_named() -> None:
    observed = training({**DIGITS, "runPolicy": {"backoffLimit": 0}})
    failure = Failure(**OUT_OF_MEMORY, exit_code=137)
    failed = step(replace(observed, report=report(observed, RunPhase.FAILED, failures=1, failure=failure)))
    assert verdict(failed, "Failed")[0] == "True"
    assert verdict(failed, "MemoryExceeded") == ("True", "JobEnded"), "no plan follows"
    assert "set spec.resources.memory to more" in condition_of(failed, "MemoryExceeded").message


def test_too_little_memory_of_a_gpu_needs_no_main_memory() -> None:
    desired = step(reported(training(), exit_code=1))
    assert all(c.type != "MemoryExceeded" for c in status(desired).conditions)


@pytest.mark.parametrize("end", [lambda job: killed(job, "2026-03-01T11:00:00Z"), reported])
def test_a_job_that_has_recovered_does_not_restart_after_an_upgrade(end: Any) -> None:
    """The earlier release kept no record."""
    observed = end(replace(training(), view=LARGE))
    if observed.report is not None:
        observed = replace(observed, report=observed.report.replace('"Restarting"', '"Running"'))
    desired = step(observed)
    assert all(c.type != "MemoryExceeded" for c in status(desired).conditions) and not desired.scales
    observed = after(observed, desired)
    assert not needs_view(observed)
    again = killed(observed, "2026-03-01T12:00:00Z")
    assert verdict(step(again), "MemoryExceeded") == ("True", "Raising"), "the next one counts"


def test_an_end_before_the_first_report_counts() -> None:
    desired = step(killed(started({**DIGITS, "runPolicy": {"backoffLimit": 0}})))
    assert verdict(desired, "Failed") == ("True", "OutOfMemory")


def test_pods_that_stop_after_the_end_of_a_rank_do_not_count_again() -> None:
    """Regression: containerd names memory as the reason whenever such a container ends, also if it stops in order."""
    observed = reported(replace(training(), view=LARGE))
    observed = after(observed, step(observed))
    stopping = after(observed, step(observed))
    pods = [replace(pod, deleting=True) for pod in killed(stopping).pods]
    desired = step(replace(stopping, pods=tuple(pods)))
    assert status(desired).failures == 1 and not [e for e in desired.events if e.reason == "PodOutOfMemory"]


@pytest.mark.parametrize("state", ["state", "lastState"])
def test_the_end_of_a_container_is_read_from_its_status(state: str) -> None:
    ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-03-01T12:00:00Z"}
    container = {"name": "trainer", "restartCount": 1, state: {"terminated": ended}}
    body = {"metadata": {"name": "p", "uid": "u"}, "spec": {}, "status": {"containerStatuses": [container]}}
    assert trimmed(body).memory_killed_at == "2026-03-01T12:00:00Z"  # type: ignore[union-attr]
    ended["exitCode"] = 143
    assert trimmed(body).memory_killed_at == "", "it was asked to stop"  # type: ignore[union-attr]
    container["name"], ended["exitCode"] = "sidecar", 137
    assert trimmed(body).memory_killed_at == ""  # type: ignore[union-attr]


def test_a_job_that_is_suspended_meanwhile_is_not_reconciled_without_end() -> None:
    """Regression: only a plan whose pods start had the record, and so each reconcile asked for another one at once."""
    observed = changed(reported(replace(training(), view=LARGE)), suspend=True)
    before = plan_of(observed)
    observed = replace(after(observed, step(observed)), pods=())
    for _ in range(2):
        desired = step(observed)
        assert desired.requeue_after_s is None and not desired.objects
        observed = after(observed, desired)
    observed = changed(observed, suspend=False)
    assert plan_of(after(observed, step(observed))).memory_nbytes == 2 * before.memory_nbytes, "the end is not lost"


def all_killed(observed: Observed, minute: int = 0, most: int = 99) -> Observed:
    """Return the job after the containers of its first ``most`` pods ended, a second after each other."""
    at = [f"2026-03-01T12:{minute:02}:{second % 20:02}Z" for second in range(len(observed.pods))]
    pods = [replace(pod, memory_killed_at=at[i]) if i < most else pod for i, pod in enumerate(observed.pods)]
    return replace(observed, pods=tuple(pods))


def test_pods_that_end_together_count_once() -> None:
    """Regression: all pods of a job reach their limit in the same step, which exceeded the backoff limit at once."""
    observed = replace(training({**DIGITS, "runPolicy": {"backoffLimit": 2}}), view=LARGE)
    for most in (1, 2, 3):  # The kubelets report at different times.
        desired = step(all_killed(observed, most=most))
        assert status(desired).failures == 1 and verdict(desired, "MemoryExceeded") == ("True", "Raising")
        observed = after(all_killed(observed, most=most), desired)
    again = step(all_killed(observed, minute=1))
    assert status(again).failures == 2, "the next attempt counts again, even if it ends soon"
    observed = after(all_killed(observed, minute=1), again)
    assert verdict(step(all_killed(observed, minute=2)), "Failed") == ("True", "OutOfMemory")


def test_pods_that_run_on_after_a_change_of_the_spec_do_not_count_again() -> None:
    """Regression: an end of the same attempt, which the next kubelet reported later, counted for the new spec."""
    observed = training({**DIGITS, "nodes": {"min": 2, "max": 3}})
    least = plan_of(observed).memory_nbytes
    full = nodes({"name": "n", "count": 3, "cpu": 2, "memory": str(int(1.2 * least))})
    observed = replace(observed, view=full)
    for _ in range(2):  # The end is counted, and no node has more memory.
        observed = after(killed(observed, LATE), step(killed(observed, LATE)))
    early = LATE.replace("05Z", "03Z")
    others = [replace(pod, memory_killed_at=pod.memory_killed_at or early) for pod in observed.pods]
    observed = changed(replace(observed, pods=tuple(others)), nodes={"min": 2, "max": 4})
    for _ in range(3):
        observed = after(observed, step(observed))
    record = plan_of(observed).failures
    assert plan_of(observed).spec_digest == parse_observed(observed).digest and observed.pods
    assert record is not None and (record.pod_kills, parse_observed(observed).memory_to_try) == (1, ())


@pytest.mark.parametrize("hour", [11, 12])
def test_more_ends_than_the_record_has_room_for_do_not_change_it_again_and_again(hour: int) -> None:
    """Regression: the ends that the record had dropped were counted anew in each reconcile."""
    many = nodes({"name": "n", "count": 40, "cpu": 2, "memory": "64Gi"})
    spec = {**DIGITS, "nodes": {"min": 40, "max": 40}, "resources": {"memory": "1Gi"}}
    spec["runPolicy"] = {"backoffLimit": 9}
    observed = all_killed(settled(after(seen(spec, view=many), step(seen(spec, view=many)))))
    if hour == 11:  # Under an earlier release.
        pods = [replace(pod, memory_killed_at=pod.memory_killed_at.replace("T12", "T11")) for pod in observed.pods]
        observed = replace(observed, pods=tuple(pods))
    assert len(observed.pods) == 40
    observed = after(observed, first := step(observed))
    counted = plan_of(observed).failures
    observed = after(observed, step(observed))
    assert plan_of(observed).failures == counted and status(first).failures == (1 if hour == 12 else 0)
    again = all_killed(observed, minute=1, most=1).pods[:1]
    observed = replace(observed, pods=(*again, *observed.pods[1:]))
    observed = after(observed, second := step(observed))
    counted = plan_of(observed).failures
    observed = after(observed, step(observed))
    assert plan_of(observed).failures == counted and status(second).failures == (2 if hour == 12 else 1)


def without_more_memory() -> tuple[Observed, Observed]:
    """Return a job before and after the operator found that no node has more memory than its pods reached."""
    observed = training()
    full = nodes({"name": "n", "count": 3, "cpu": 2, "memory": str(plan_of(observed).memory_nbytes)})
    observed = reported(replace(observed, view=full))
    observed = after(observed, step(observed))
    return observed, after(observed, step(observed))


def test_a_status_that_was_not_written_does_not_announce_more_memory_for_ever() -> None:
    """Regression: the record is stored before the status, which the API server may refuse, or an operator may miss."""
    before, later = without_more_memory()
    for status_before in (before.job.status, {}):
        desired = step(replace(later, job=replace(later.job, status=status_before)))
        assert verdict(desired, "MemoryExceeded") == ("True", "CannotRaise")
        assert "ower the batch size" in condition_of(desired, "MemoryExceeded").message


def test_a_spec_that_is_changed_back_has_its_condition_again() -> None:
    """Regression: the condition was True, with the message that no pod has reached its limit."""
    _, observed = without_more_memory()
    observed = replaced(changed(observed, **OTHER_MEMORY[0]))
    observed = after(observed, step(observed))
    assert verdict(step(observed), "MemoryExceeded") == ("False", "SpecChanged")
    observed = replaced(changed(observed, trainer={}))
    assert verdict(step(observed), "MemoryExceeded") == ("True", "CannotRaise")


def test_a_stopped_job_starts_again_although_no_node_has_more_memory() -> None:
    """Regression: it could only start with more memory than before, and waited for ever."""
    observed = training()
    full = nodes({"name": "n", "count": 3, "cpu": 2, "memory": str(plan_of(observed).memory_nbytes)})
    observed = changed(reported(replace(observed, view=full)), suspend=True)
    observed = replace(after(observed, step(observed)), pods=())
    observed = changed(after(observed, step(observed)), suspend=False)
    first = step(observed)
    assert verdict(first, "MemoryExceeded") == ("True", "CannotRaise") and first.requeue_after_s == 0.0
    observed = after(observed, first)
    second = step(observed)
    assert verdict(second, "Planned") == ("True", "Planned") and second.plan is not None
    assert verdict(second, "MemoryExceeded") == ("True", "CannotRaise")


def test_an_end_that_makes_the_job_fail_stays_counted() -> None:
    """Regression: the number of failures became smaller again after the end of the job."""
    observed = killed(training({**DIGITS, "runPolicy": {"backoffLimit": 0}}))
    failed = step(observed)
    assert verdict(failed, "Failed") == ("True", "OutOfMemory") and status(failed).failures == 1
    assert status(step(after(observed, failed))).failures == 1
