"""Tests of evictions because of storage: which ones count, what they name, and that they end the job."""

from dataclasses import replace
from typing import Any

import pytest

from dlcontract import FAILURES_KEY, FailureAllowance, RunPhase
from dljob.api import DLJobSpec
from dljob.job.observed import Eviction, Observed
from dljob.kube.objects.pods.evictions import eviction
from dljob.reconcile.failures.storage_evictions import cause_of
from support.builders import DIGITS, after, changed, plan_of, report
from support.job_lifecycle import condition_of, started, status, step, training, verdict

# As kubelets write them, by the format strings of Kubernetes' pkg/kubelet/eviction/helpers.go.
TMP = 'Usage of EmptyDir volume "tmp" exceeds the limit "2Gi". '
DATASET = 'Usage of EmptyDir volume "dataset" exceeds the limit "2Gi". '
STAGED = 'Usage of EmptyDir volume "checkpoints" exceeds the limit "3Gi". '
OTHER = 'Usage of EmptyDir volume "cache" exceeds the limit "1Gi". '
POD = "Pod ephemeral local storage usage exceeds the total limit of containers 21Gi. "
CONTAINER = 'Container trainer exceeded its local ephemeral storage limit "21Gi". '
LOW = "The node was low on resource: ephemeral-storage. Threshold quantity: 10737418240, available: 9961472Ki. "
NO_REQUEST = f"{LOW}Container trainer was using 1500Mi, request is 0, has larger consumption of ephemeral-storage. "
ABOVE = f"{LOW}Container trainer was using 22Gi, request is 20Gi, has larger consumption of ephemeral-storage. "
MEMORY = (
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 88Mi. "
    "Container trainer was using 3Gi, request is 1Gi, has larger consumption of memory. "
)
PRESSURE = "The node had condition: [DiskPressure]. "
SCRATCH: dict[str, Any] = {**DIGITS, "trainer": {"scratch": {"size": "20Gi"}}}
AUTO: dict[str, Any] = {**DIGITS, "trainer": {"scratch": {"size": "Auto"}}}
S3: dict[str, Any] = {**DIGITS, "checkpoint": {"uri": "s3://models"}}
FETCHED = {"dataset": {"uri": "https://data.example/x.npz", "samples": 9}, "trainer": {"scratch": {"size": "20Gi"}}}


def evicted(observed: Observed, message: str = TMP, n: int = 1) -> Observed:
    """Return the job after ``n`` evictions. The evicted pods are replaced already."""
    found = tuple(Eviction("digits-cpu-1", f"old-{i}", "node-1", message) for i in range(n))
    return replace(observed, evictions=found)


@pytest.mark.parametrize(
    ("message", "spec", "counts", "words"),
    [
        (TMP, DIGITS, True, ("spec.trainer.scratch.size: found 2Gi (the default)", "such as 4Gi")),
        (TMP, SCRATCH, True, ("spec.trainer.scratch.size: found 20Gi;", "such as 40Gi")),
        (TMP, AUTO, True, ("found Auto (3Gi)", "such as 6Gi")),
        (DATASET, {**DIGITS, **FETCHED}, True, ("spec.dataset.size: found 2Gi (the default)",)),
        (STAGED, S3, True, ("spec.checkpoint.stagingSize: found 3Gi", "Set a larger size")),
        (OTHER, SCRATCH, True, ("spec.podTemplateOverrides: found sizeLimit 1Gi of the emptyDir volume cache",)),
        (POD, SCRATCH, True, ("found 20Gi", "exceed the limit of ephemeral storage (21Gi)")),
        (CONTAINER, SCRATCH, True, ("found 20Gi", "exceed the limit of ephemeral storage (21Gi)")),
        (ABOVE, SCRATCH, True, ("found 20Gi", "used 22Gi, more than its request (20Gi)")),
        (NO_REQUEST, DIGITS, False, ("does not count", "Set spec.trainer.scratch.size")),
        (LOW, SCRATCH, False, ("does not count",)),
    ],
)
def test_eviction_names_field_value_and_remedy(
    message: str, spec: dict[str, Any], counts: bool, words: tuple[str, ...]
) -> None:
    cause = cause_of(Eviction("p", "u", "n", message), DLJobSpec.model_validate(spec))
    assert cause is not None
    assert cause.counts == counts
    assert all(word in cause.text for word in words), cause.text


@pytest.mark.parametrize("message", [MEMORY, PRESSURE, "", "Pod was preempted"])
def test_other_evictions_are_not_about_storage(message: str) -> None:
    assert cause_of(Eviction("p", "u", "n", message), DLJobSpec.model_validate(DIGITS)) is None
    desired = step(evicted(training(), message, 9))
    assert verdict(desired, "Running")[0] == "True"
    assert all(c.type != "StorageExceeded" for c in status(desired).conditions)


def test_evictions_end_the_job_after_the_limit() -> None:
    observed = training({**DIGITS, "runPolicy": {"backoffLimit": 2}})
    for n in (1, 2):
        desired = step(evicted(observed, n=n))
        assert verdict(desired, "StorageExceeded") == ("True", "PodEvicted")
        [event] = [event for event in desired.events if event.reason == "PodEvicted"]
        assert event.type == "Warning" and "spec.trainer.scratch.size: found 2Gi" in event.message
        assert f"eviction {n} that counts; spec.runPolicy.backoffLimit is 2" in event.message
        assert status(desired).failures == n and not desired.scales
        observed = after(evicted(observed, n=n), desired)
        again = step(observed)
        assert not [event for event in again.events if event.reason == "PodEvicted"], "it is counted once"
        assert status(again).failures == n
    desired = step(evicted(observed, n=3))
    failed = condition_of(desired, "Failed")
    assert (failed.status.value, failed.reason) == ("True", "StorageExceeded")
    assert "3 evictions because of storage, and spec.runPolicy.backoffLimit is 2" in failed.message
    assert "spec.trainer.scratch.size: found 2Gi" in failed.message


def full_disks(observed: Observed, *at: str) -> Observed:
    """Return the job after the kubelets evicted its pods, one after the other, at these times of an hour."""
    found = [
        Eviction(f"digits-cpu-{i % 3}", f"old-{i}", f"node-{i % 3}", TMP, f"2026-03-01T12:{time}Z")
        for i, time in enumerate(at)
    ]
    return replace(observed, evictions=tuple(found))


def test_evictions_of_the_pods_of_one_attempt_count_once() -> None:
    """Regression: all ranks write as much, so that one full disk on each node exceeded the backoff limit at once."""
    observed = training({**DIGITS, "runPolicy": {"backoffLimit": 2}})
    times = ("01:00", "00:58", "02:10")
    for n in (1, 2, 3):  # The kubelets measure at different times.
        desired = step(full_disks(observed, *times[:n]))
        assert status(desired).failures == 1
        assert [event.reason for event in desired.events].count("PodEvicted") == 1, "there is an event for each"
        observed = after(full_disks(observed, *times[:n]), desired)
    assert "Number of evictions because of storage: 1" in condition_of(desired, "StorageExceeded").message
    again = step(full_disks(observed, *times, "02:50", "02:51"))
    assert status(again).failures == 2, "a pod is evicted again: that is the next attempt"
    at_once = training({**DIGITS, "runPolicy": {"backoffLimit": 2}})
    assert status(step(full_disks(at_once, *times, "02:50", "02:51"))).failures == 2
    observed = after(full_disks(observed, *times, "02:50", "02:51"), again)
    later = step(full_disks(observed, *times, "02:50", "02:51", "09:00"))
    assert verdict(later, "Failed") == ("True", "StorageExceeded")


def test_evictions_whose_times_are_unknown_count_each() -> None:
    found = tuple(Eviction(f"digits-cpu-{i}", f"old-{i}", "n", TMP, at) for i, at in enumerate(("", "soon", "")))
    desired = step(replace(training({**DIGITS, "runPolicy": {"backoffLimit": 9}}), evictions=found))
    assert status(desired).failures == 3


def test_the_time_of_an_eviction_is_read_from_the_pod() -> None:
    target = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-03-01T12:00:00Z"}
    fields = {"phase": "Failed", "reason": "Evicted", "message": TMP, "conditions": [{"type": "Ready"}, target]}
    body = {"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n"}, "status": fields}
    assert eviction(body) == Eviction("p", "u", "n", TMP, "2026-03-01T12:00:00Z")
    del fields["conditions"]
    assert eviction(body) == Eviction("p", "u", "n", TMP)


def test_evictions_and_failures_count_together() -> None:
    observed = training({**DIGITS, "runPolicy": {"backoffLimit": 2}})
    observed = after(evicted(observed), step(evicted(observed)))
    observed = replace(observed, report=report(observed, RunPhase.RESTARTING, failures=1))
    assert verdict(step(observed), "StorageExceeded") == ("True", "PodEvicted")
    failed = condition_of(step(replace(observed, report=report(observed, failures=2))), "Failed")
    assert "1 evictions because of storage and 2 failures of the training script" in failed.message


def test_eviction_before_the_first_report_counts() -> None:
    desired = step(evicted(started({**DIGITS, "runPolicy": {"backoffLimit": 0}})))
    assert verdict(desired, "Failed") == ("True", "StorageExceeded")


def test_full_node_is_named_once_and_does_not_count() -> None:
    observed = training({**DIGITS, "runPolicy": {"backoffLimit": 0}})
    desired = step(evicted(observed, NO_REQUEST))
    [event] = [event for event in desired.events if event.reason == "PodEvicted"]
    assert "does not count" in event.message
    assert verdict(desired, "Running")[0] == "True" and status(desired).failures == 0
    observed = after(evicted(observed, NO_REQUEST), desired)
    assert not [event for event in step(observed).events if event.reason == "PodEvicted"]


def test_changed_spec_starts_at_zero() -> None:
    observed = training({**DIGITS, "runPolicy": {"backoffLimit": 1}})
    observed = after(evicted(observed), step(evicted(observed)))
    larger = changed(observed, trainer={"scratch": {"size": "20Gi"}})
    for _ in range(4):  # The pods stop, and those of the new plan start.
        larger = after(larger, step(larger))
        larger = replace(larger, pods=()) if any(item.replicas == 0 for item in larger.sets) else larger
    if plan_of(larger).spec_digest == plan_of(observed).spec_digest:
        pytest.fail("the job has no new plan")
    assert verdict(step(larger), "StorageExceeded") == ("False", "SpecChanged")


def test_agents_still_read_the_record() -> None:
    observed = training()
    observed = after(evicted(observed), step(evicted(observed)))
    assert observed.plan is not None
    assert FailureAllowance.parse(observed.plan[FAILURES_KEY]) == FailureAllowance()


def test_plan_of_a_job_without_evictions_has_no_record() -> None:
    observed = training()
    assert observed.plan is not None and FAILURES_KEY not in observed.plan


def test_an_eviction_of_a_job_that_is_suspended_meanwhile_has_one_event() -> None:
    """Regression: a job without pods stored no record, so that each reconcile counted the eviction and posted it."""
    observed = changed(evicted(training()), suspend=True)
    desired = step(observed)
    assert [event.reason for event in desired.events].count("PodEvicted") == 1
    again = step(replace(after(observed, desired), pods=()))
    assert "PodEvicted" not in [event.reason for event in again.events] and status(again).failures == 1
