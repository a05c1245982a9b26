"""Tests of jobs in a queue of Kueue, from the Workload to the end. A replayer plays the part of Kueue."""

from dataclasses import replace
from datetime import timedelta

import pytest

from dlcontract import RunPhase
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile import needs_view, parse_observed
from support.builders import DIGITS, NOW, changed, nodes, plan_of, report
from support.kueue import replay
from support.kueue.life import API, ELASTIC, FEW, Life


def test_job_asks_for_quota_and_waits_without_pods() -> None:
    life = Life().steps()
    assert life.replicas == 0 and life.condition() == ("False", "Queued")
    assert life.condition("Suspended") == ("True", "InQueue")
    assert life.body is not None
    [pod_set] = life.body["spec"]["podSets"]
    assert (pod_set["name"], pod_set["count"], pod_set.get("minCount")) == ("cpu", 3, None)
    assert pod_set["template"]["spec"]["containers"][0]["resources"]["requests"].keys() == {"cpu", "memory"}
    assert life.body["spec"]["queueName"] == "team-a" and life.body["spec"]["active"] is True
    meta = life.body["metadata"]
    assert meta["labels"]["kueue.x-k8s.io/job-uid"] == life.observed.job.uid
    assert meta["ownerReferences"][0]["uid"] == life.observed.job.uid


def test_waiting_changes_nothing_again_and_again() -> None:
    life = Life().steps().kueue(replay.pending).steps(2)
    before = life.body
    life.step()
    assert not life.desired.objects and life.desired.workload is None and life.body == before
    assert not needs_view(life.observed)
    assert "insufficient quota" in str(life.desired.status)


def test_no_label_of_a_queue_reaches_pods_and_sets() -> None:
    life = Life().running()
    for manifest in life.desired.objects:
        assert "queue-name" not in str(manifest)


def test_admitted_job_starts_and_reports_ready_pods() -> None:
    life = Life().steps().kueue(replay.admitted).steps()
    assert life.replicas == 3 and life.condition() == ("True", "AdmittedByKueue")
    assert life.condition("Suspended")[0] == "False"
    assert life.workload("PodsReady") == ("False", "WaitForStart")
    life.pods().steps()
    assert life.workload("PodsReady") == ("True", "Started")
    life.pods(ready=False).steps()
    assert life.workload("PodsReady") == ("False", "WaitForRecovery")
    life.pods().steps()
    assert life.workload("PodsReady") == ("True", "Recovered")


def test_reserved_quota_is_not_enough_while_checks_are_open() -> None:
    life = Life().steps().kueue(replay.reserved).steps()
    assert life.replicas == 0 and life.condition() == ("False", "AdmissionChecks")


def test_flavors_and_checks_place_the_pods() -> None:
    life = Life().steps().kueue(replay.admitted, None, "zone-a")
    assert life.body is not None
    update = {"name": "cpu", "nodeSelector": {"pool": "p1"}, "labels": {"l": "1"}, "annotations": {"a": "2"}}
    life.body["status"]["admissionChecks"] = [{"name": "provision", "state": "Ready", "podSetUpdates": [update]}]
    life.step()
    [manifest] = [item for item in life.desired.objects if item["kind"] == "StatefulSet"]
    template = manifest["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"zone": "a", "pool": "p1"}
    assert {"key": "team", "operator": "Exists"} in template["spec"]["tolerations"]
    assert template["metadata"]["labels"]["l"] == "1" and template["metadata"]["annotations"]["a"] == "2"
    life.pods().steps()
    assert life.replicas == 3, "a restart of the operator, which reads no flavors then, must not stop the pods"
    life.flavors = {}
    life.steps()
    assert life.replicas == 3


def test_missing_flavor_is_reported() -> None:
    life = Life().steps().kueue(replay.admitted, None, "gone").steps(1)
    assert life.replicas == 0 and life.condition() == ("False", "FlavorNotFound")
    assert life.desired.requeue_after_s is not None


def test_partial_admission_plans_again_for_exactly_the_admitted_pods() -> None:
    life = Life(ELASTIC)
    life.view = FEW
    life.steps()
    assert life.body is not None
    [pod_set] = life.body["spec"]["podSets"]
    assert pod_set["count"] == 3 and pod_set["minCount"] == 1
    life.kueue(replay.admitted, {"cpu": 2}).step()
    [manifest] = [item for item in life.desired.objects if item["kind"] == "StatefulSet"]
    asked, given = (each["template"]["spec"]["containers"][0]["resources"] for each in (pod_set, manifest["spec"]))
    assert given == asked, "the pods must not request more than Kueue has admitted"
    life.steps()
    assert life.replicas == 2 and plan_of(life.observed).nodes == 2
    life.pods().steps()
    assert life.replicas == 2 and life.body["spec"]["podSets"][0]["count"] == 3
    # Evicted, and admitted with all pods: the Workload still asks for them.
    life.kueue(replay.evicted).step()
    life.pods().steps()
    life.kueue(replay.admitted).steps()
    assert life.replicas == 3 and plan_of(life.observed).nodes == 3


@pytest.mark.parametrize(
    ("reason", "requeued"),
    [("Preempted", "True"), ("NodeFailures", "True"), ("PodsReadyTimeout", "False"), ("ClusterQueueStopped", "False")],
)
def test_evicted_job_stops_first_and_then_gives_up_its_quota(reason: str, requeued: str) -> None:
    life = Life().running().kueue(replay.evicted, reason, "because")
    life.step()
    assert life.replicas == 0 and life.condition() == ("False", "Evicted")
    assert life.workload("QuotaReserved") == ("True", "QuotaReserved"), "pods still write a checkpoint"
    life.pods().steps()
    assert life.body is not None and "admission" not in life.body["status"]
    assert life.workload("QuotaReserved") == ("False", "Pending")
    assert life.workload("Admitted") == ("False", "NoReservation")
    assert life.workload("Requeued") == (requeued, reason)
    assert life.workload("PodsReady") == ("False", "WaitForStart")
    assert life.condition() == ("False", "Queued")
    life.kueue(replay.admitted).steps()
    assert life.replicas == 3


def test_evicted_job_without_a_valid_spec_stops_too() -> None:
    """Fixed bug: its pods ran on without quota, and Kueue waited for them without end."""
    life = Life().running()
    valid = life.observed.job
    life.observed = replace(life.observed, job=replace(valid, spec={}, spec_problem="spec: found too much"))
    assert life.steps().replicas == 3, "while Kueue admits them, its pods run on"
    life.kueue(replay.evicted, "Preempted", "because").step()
    assert life.replicas == 0 and life.condition() == ("False", "Evicted")
    life.pods().steps()
    assert life.workload("QuotaReserved") == ("False", "Pending")
    assert life.kueue(replay.admitted).steps().replicas == 0, "without a spec, no pod starts"
    life.observed = replace(life.observed, job=replace(valid, status=life.observed.job.status))
    assert life.steps().replicas == 3


def test_suspended_job_that_looks_at_its_data_again_leaves_the_queue() -> None:
    """Fixed bug: its Workload held quota for as long as the job was suspended."""
    life = Life().running()
    task = {"task": {"type": "TabularRegression"}, "dataset": {"uri": "pvc://prices/table.csv"}, "suspend": True}
    life.observed = replace(life.observed, job=replace(life.observed.job, spec=task, generation=9))
    life.step()
    assert life.replicas == 0 and life.body is not None
    life.pods().steps()
    assert life.body is None


def test_evicted_job_does_not_wait_for_a_pod_on_a_lost_node() -> None:
    life = Life().running()
    pod = life.observed.pods[0]
    assert pod.node is not None
    life.observed = replace(life.observed, lost_nodes={pod.node: NOW - timedelta(days=1)})
    life.kueue(replay.evicted).step()
    assert [target.name for target in life.desired.deletes if target.force] == [pod.name]


def test_deactivated_job_stops_and_waits_to_be_activated() -> None:
    life = Life().running().kueue(replay.deactivated).steps()
    life.pods().steps()
    assert life.replicas == 0 and life.condition() == ("False", "Deactivated")
    assert life.body is not None
    life.body["spec"]["active"] = True
    life.kueue(replay.admitted).steps()
    assert life.replicas == 3


@pytest.mark.parametrize(("phase", "reason"), [(RunPhase.SUCCEEDED, "Succeeded"), (RunPhase.FAILED, "Failed")])
def test_end_of_the_job_frees_the_quota(phase: RunPhase, reason: str) -> None:
    life = Life().running()
    life.observed = replace(life.observed, report=report(life.observed, phase))
    life.steps(2)
    assert life.workload("Finished") is None, "its pods have not stopped yet"
    life.pods().steps()
    assert life.workload("Finished") == ("True", reason)
    assert life.workload("QuotaReserved") == ("True", "QuotaReserved")


def test_deleted_workload_stops_the_job_which_asks_again() -> None:
    life = Life().running()
    life.body = None
    life.step()
    assert life.replicas == 0 and life.body is None
    life.pods().steps()
    assert life.body is not None and life.condition() == ("False", "Queued")


def test_changed_spec_asks_again_with_a_new_workload() -> None:
    life = Life().running()
    first = life.body
    life.observed = changed(life.observed, globalBatchSize=48)
    life.step()
    assert life.replicas == 0 and life.body is not None
    life.pods().steps()
    assert first is not None and life.body["metadata"]["uid"] != first["metadata"]["uid"]
    assert life.condition() == ("False", "Queued") and life.workload("QuotaReserved") is None


def test_running_job_whose_changed_class_does_not_exist_runs_on() -> None:
    life = Life().running()
    life.observed = changed(life.observed, scheduling={"priorityClassName": "bach"})
    life.observed = replace(life.observed, lacks_priority_class="bach")
    life.steps()
    assert life.replicas == 3 and life.condition() == ("True", "AdmittedByKueue")
    assert life.condition("PriorityClassFound") == ("False", "PriorityClassNotFound")
    life.observed = replace(life.observed, lacks_priority_class="")
    assert life.steps().replicas == 0


def test_suspended_job_leaves_the_queue() -> None:
    life = Life().running()
    life.observed = changed(life.observed, suspend=True)
    life.step()
    assert life.replicas == 0 and life.body is not None
    life.pods().steps()
    assert life.body is None and life.condition() == ("False", "Suspended")
    life.observed = changed(life.observed, suspend=False)
    life.steps()
    assert life.body is not None and life.condition() == ("False", "Queued")


def test_job_without_kueue_waits_and_says_so() -> None:
    life = Life()
    life.api = ""
    life.step()
    assert life.condition() == ("False", "NoKueue") and life.replicas == 0 and not life.desired.objects
    life.api = API
    assert life.steps().condition() == ("False", "Queued")


def test_admitted_pods_run_on_when_kueue_is_removed() -> None:
    life = Life().running()
    life.api = ""
    assert life.steps().replicas == 3


def test_pods_that_started_without_kueue_run_on() -> None:
    """An upgrade of the operator, or a label that somebody adds, must not stop a job that trains."""
    life = Life()
    queue = life.observed.job.queue
    life.observed = replace(life.observed, job=replace(life.observed.job, queue=""))
    life.step()
    life.pods()
    life.observed = replace(life.observed, job=replace(life.observed.job, queue=queue))
    life.steps()
    assert life.replicas == 3 and life.body is None and life.condition() == ("True", "Started")


def test_label_that_is_removed_while_pods_run_takes_effect_when_they_stop() -> None:
    life = Life().running()
    life.observed = replace(life.observed, job=replace(life.observed.job, queue=""))
    life.steps()
    assert life.replicas == 3 and life.body is not None
    life.kueue(replay.evicted).step()
    assert life.replicas == 0
    life.pods().steps()
    assert life.body is None and life.replicas == 3 and plan_of(life.observed).admission is None


def test_waiting_job_follows_its_label_to_another_queue() -> None:
    life = Life().steps()
    life.observed = replace(life.observed, job=replace(life.observed.job, queue="team-b"))
    life.steps()
    assert life.body is not None and life.body["spec"]["queueName"] == "team-b"


def test_job_without_any_plan_does_not_ask() -> None:
    life = Life()
    life.view = nodes({"name": "n", "count": 1, "cpu": 2, "memory": "4Gi"})
    life.steps()
    assert life.body is None and life.condition() == ("False", "NoPlan")


def test_plan_only_job_is_in_no_queue() -> None:
    life = Life({**DIGITS, "planning": {"mode": "PlanOnly"}}).steps()
    assert life.body is None and life.condition("Planned") == ("True", "PlanOnly")


def test_priority_class_must_exist() -> None:
    life = Life(queue_priority="high").steps()
    assert life.body is None and life.condition() == ("False", "PriorityClassNotFound")
    life.priority = 1000
    life.steps()
    assert life.body is not None and life.body["spec"]["priority"] == 1000
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    assert life.body["spec"]["priorityClassRef"] == reference


def test_older_api_names_the_priority_class_in_two_fields() -> None:
    life = Life(queue_priority="high")
    life.api, life.priority = "kueue.x-k8s.io/v1beta1", 7
    life.steps()
    assert life.body is not None
    spec = life.body["spec"]
    assert (spec["priorityClassName"], spec["priority"]) == ("high", 7)
    assert spec["priorityClassSource"] == "kueue.x-k8s.io/workloadpriorityclass" and "priorityClassRef" not in spec


def test_admission_is_stored_with_the_plan_and_changes_the_revision_of_pods() -> None:
    life = Life().running()
    found = plan_of(life.observed)
    assert found.admission is not None and found.revision != found.model_copy(update={"admission": None}).revision
    assert StoredPlan.parse(found.data()).admission == found.admission
    assert parse_observed(life.observed).queued
