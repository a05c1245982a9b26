"""Tests of node faults: what points to a node, and how a job leaves a node with repeated faults."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlcontract import Failure, RunPhase, reasons
from dljob.faults import Fault, FaultKind, LeftOut
from dljob.job.observed import ClaimSeen, Observed, Stuck
from dljob.reconcile import needs_view, node_faults, parse_observed
from support.builders import A100, DIGITS, MIXED, NOW, Json, after, changed, nodes, plan_of, report, seen, settled
from support.job_lifecycle import DOWN, condition_of, kinds, started, status, step, training, verdict
from support.manifests.schema_validation import assert_valid

NODE = "digits-cpu-node-1"
"""Node of the pod digits-cpu-1, see ``settled``."""
FIVE = nodes(*({"name": f"digits-cpu-node-{n}", "cpu": 2, "memory": "4Gi"} for n in range(5)))
THREE = nodes(*({"name": f"digits-cpu-node-{n}", "cpu": 2, "memory": "4Gi"} for n in range(3)))
UNTIL = NOW + timedelta(hours=1)


def out(node: str = NODE) -> dict[str, LeftOut]:
    kinds = (FaultKind.DEVICE, FaultKind.DEVICE)
    return {node: LeftOut(node=node, namespace="team-a", since=NOW, until=UNTIL, kinds=kinds)}


def failure(reason: str = reasons.DEVICE_FAILED, host: str = "digits-cpu-1", **more: Any) -> Failure:
    return Failure(reason=reason, message="as it said", host=host, **more)


def broken(observed: Observed, found: Failure, phase: RunPhase = RunPhase.RESTARTING, **more: Any) -> Observed:
    """Return the job after its coordinator has reported a failure."""
    fields: Json = {"failure": found, "failures": 1, "restarts": {found.reason: 1}, **more}
    return replace(observed, report=report(observed, phase, **fields))


def faults(observed: Observed) -> tuple[Fault, ...]:
    return node_faults(parse_observed(observed), NOW)


COUNTS: dict[str, tuple[Failure, FaultKind | None]] = {
    # failure, kind of the fault of its node
    "device": (failure(), FaultKind.DEVICE),
    "device missing": (failure(reasons.DEVICE_MISSING), FaultKind.DEVICE),
    "host network": (failure(host=NODE), FaultKind.DEVICE),
    "unreachable pod": (failure(reasons.POD_LOST, unreachable=True), FaultKind.NETWORK),
    "agent ended": (failure(reasons.POD_LOST), None),
    "another job's pod": (failure(host="other-cpu-1"), None),
    "no pod": (failure(host=""), None),
    "unreachable, but of another reason": (failure(reasons.HUNG, unreachable=True), None),
} | {
    reason: (failure(reason), None)
    for reason in (*reasons.OF_PROGRAM, reasons.OUT_OF_MEMORY, reasons.POD_STOPPED, reasons.RANK_KILLED, reasons.BAD_INPUT)
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTS.values(), ids=COUNTS)
def test_only_faults_of_devices_and_connections_point_to_a_node(case: tuple[Failure, FaultKind | None]) -> None:
    found, kind = case
    listed = [(fault.node, fault.kind, fault.namespace) for fault in faults(broken(training(), found))]
    assert listed == ([(NODE, kind, "team-a")] if kind else [])


def test_failure_that_ends_the_job_counts_too() -> None:
    assert len(faults(broken(training(), failure(), RunPhase.FAILED))) == 1


@pytest.mark.parametrize("phase", [RunPhase.RUNNING, RunPhase.LAUNCHING, RunPhase.STOPPED, RunPhase.SUCCEEDED])
def test_failure_before_ranks_trained_again_is_old(phase: RunPhase) -> None:
    assert faults(broken(training(), failure(), phase)) == ()


def test_each_attempt_is_a_fault_of_its_own_and_repeated_reports_are_not() -> None:
    observed = training()
    again = {"failures": 2, "restarts": {reasons.DEVICE_FAILED: 2}}
    # Another coordinator has taken over, and its report still contains the failure.
    taken = {"restarts": {reasons.DEVICE_FAILED: 1, reasons.COORDINATOR_LOST: 1}}
    last = {"failures": 3, "restarts": {reasons.DEVICE_FAILED: 2}}
    keys = [
        faults(broken(observed, failure(), RunPhase(phase), **more))[0].key
        for phase, more in (
            ("Restarting", {}),
            ("Restarting", {"step": 11}),
            ("Restarting", taken),
            ("Restarting", again),
            ("Failed", last),
        )
    ]
    assert keys[0] == keys[1] == keys[2] and len(set(keys)) == 3


@pytest.mark.parametrize(
    ("changes", "count"),
    [({"deleting": True}, 0), ({"node": None}, 0), ({}, 1)],
    ids=["deleted pod", "pod without a node", "pod that lives"],
)
def test_only_pods_that_live_point_to_their_node(changes: Json, count: int) -> None:
    observed = broken(training(), failure(reasons.POD_LOST, unreachable=True))
    pods = [replace(pod, **changes) if pod.name == "digits-cpu-1" else pod for pod in observed.pods]
    assert len(faults(replace(observed, pods=tuple(pods)))) == count


def test_node_that_is_not_ready_counts_once_and_only_if_it_failed_by_itself() -> None:
    """Its pod is unreachable too, but the condition of the node is the better evidence."""
    observed = broken(training(), failure(reasons.POD_LOST, unreachable=True))
    drained = replace(observed, lost_nodes={NODE: NOW})
    assert faults(drained) == ()
    [fault] = faults(replace(drained, failed_nodes={NODE: NOW}))
    assert (fault.kind, fault.namespace, fault.key) == (FaultKind.NOT_READY, "", f"{NODE}/{NOW.isoformat()}")


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ("nvidia-container-cli: detection error: nvml error: gpu is lost", 1),
        ("nvidia-container-cli: initialization error: nvml error: driver not loaded", 1),
        ("nvidia-container-cli: initialization error: driver rpc error: timed out", 1),
        ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.6", 0),
        ('exec: "train": executable file not found in $PATH', 0),
    ],
)
def test_container_that_a_broken_gpu_keeps_from_starting(message: str, count: int) -> None:
    observed = started()
    stuck = tuple(replace(pod, stuck=Stuck("RunContainerError", message)) for pod in observed.pods[:1])
    found = faults(replace(observed, pods=stuck + observed.pods[1:]))
    assert [fault.node for fault in found] == ["digits-cpu-node-0"] * count


def test_finished_job_shows_no_fault() -> None:
    observed = broken(training(), failure(), RunPhase.FAILED)
    assert faults(after(observed, step(observed))) == ()


class TestPlans:
    def test_new_plan_avoids_nodes_that_are_left_out_and_says_why(self) -> None:
        first = seen({**DIGITS, "nodes": {"min": 1, "max": 5}}, FIVE, left_out=out())
        observed = after(first, step(first))
        assert plan_of(observed).avoid == (NODE,) and plan_of(observed).nodes <= 4
        rejected = plan_of(observed).status.rejected
        text = f"left out because of repeated faults: {NODE} until 2026-03-01T13:00Z (2 device faults)"
        assert [item.reason for item in rejected if NODE in item.reason] == [text]
        [terms] = [
            term
            for manifest in step(first).objects
            if manifest["kind"] == "StatefulSet"
            for term in manifest["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]["nodeSelectorTerms"][:1]
        ]
        assert terms["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": [NODE]}]
        assert terms["matchExpressions"], "the nodes still need the device"
        for manifest in step(first).objects:
            assert_valid(manifest)

    def test_older_operator_restarts_nothing(self) -> None:
        """It does not know the field, and compares only the revisions of plan and pods."""
        first = seen(DIGITS, FIVE, left_out=out())
        plan = plan_of(after(first, step(first)))
        assert plan.avoid and plan.revision == plan.model_copy(update={"avoid": None}).revision

    def test_override_of_the_affinity_does_not_bring_the_node_back(self) -> None:
        term = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
        for change in (
            {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term, term]}},
            {"requiredDuringSchedulingIgnoredDuringExecution": None},
        ):
            override = {"manager": "me", "spec": {"affinity": {"nodeAffinity": change}}}
            first = seen({**DIGITS, "podTemplateOverrides": [override]}, FIVE, left_out=out())
            [found] = [item for item in step(first).objects if item["kind"] == "StatefulSet"]
            affinity = found["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
            terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
            assert terms and all(item["matchFields"][0]["values"] == [NODE] for item in terms)

    def test_only_nodes_with_a_device_of_the_plan_are_avoided(self) -> None:
        first = seen(
            {**DIGITS, "devices": ["a100"], "nodes": {"min": 1, "max": 1}}, MIXED, left_out=out("t-0") | out("a-1")
        )
        found = plan_of(after(first, step(first)))
        assert {group.device for group in found.groups} == {A100} and found.avoid == ("a-1",)

    def test_job_waits_if_only_left_out_nodes_could_run_it(self) -> None:
        first = seen(DIGITS, THREE, left_out=out())
        desired = step(first)
        assert verdict(desired, "Planned") == ("False", "NodesLeftOut")
        message = condition_of(desired, "Planned").message
        assert f"{NODE} until 2026-03-01T13:00Z (2 device faults)" in message and "dljob.dev/ignore-faults" in message
        assert desired.requeue_after_s and not kinds(desired)
        later = replace(after(first, desired), left_out={})
        assert verdict(step(later, 3600), "Planned") == ("True", "Planned")

    def test_job_that_no_node_could_run_is_told_the_real_reason(self) -> None:
        desired = step(seen({**DIGITS, "nodes": {"min": 7, "max": 7}}, THREE, left_out=out()))
        assert verdict(desired, "Planned") == ("False", "TooFewNodes")

    def test_fixed_plan_waits_too(self) -> None:
        fixed = {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 3}]}
        assert verdict(step(seen({**DIGITS, "planning": fixed}, THREE, left_out=out())), "Planned")[1] == "NodesLeftOut"

    def test_plan_without_left_out_nodes_is_stored_as_before(self) -> None:
        data = plan_of(started()).data()
        assert '"avoid"' not in "".join(data.values())


def moving(view: Any = FIVE, spec: Json = DIGITS, **more: Any) -> Observed:
    """Return a job on which a node has just failed once too often."""
    observed = broken(training(spec), failure(), failures=2, restarts={reasons.DEVICE_FAILED: 2})
    return replace(observed, view=view, left_out=out(), **more)


def stopped(observed: Observed) -> Observed:
    return replace(observed, pods=(), report=report(observed, RunPhase.STOPPED))


class TestMoves:
    def test_job_leaves_the_node_after_its_pods_wrote_a_checkpoint(self) -> None:
        observed = moving()
        assert needs_view(observed)
        leaving = step(observed)
        assert verdict(leaving, "NodeFaulty") == ("True", "Replanning")
        assert leaving.scales == DOWN and verdict(leaving, "Running") == ("False", "Replacing")
        assert "a node is faulty" in condition_of(leaving, "Running").message
        assert any(event.reason == "Replanning" and event.type == "Warning" for event in leaving.events)
        going = after(observed, leaving)
        going = replace(going, report=report(going, RunPhase.STOPPED))
        assert condition_of(step(going), "NodeFaulty").message == condition_of(leaving, "NodeFaulty").message
        assert "a node is faulty" in condition_of(step(going), "Running").message
        down = stopped(after(observed, leaving))
        assert needs_view(down), "the failure is no longer in the report, but the decision is in the status"
        new = step(down, 10)
        assert verdict(new, "NodeFaulty") == ("False", "Replanned")
        running = settled(after(down, new))
        found = plan_of(running)
        assert (found.avoid, found.replans, found.nodes) == ((NODE,), 1, 3)
        assert not needs_view(running)
        calm = step(running, 20)
        assert calm.scales == () and "StatefulSet" not in kinds(calm)

    def test_other_jobs_on_the_node_stay(self) -> None:
        observed = replace(training(), view=FIVE, left_out=out())
        assert not needs_view(observed)
        desired = step(observed)
        assert desired.scales == () and "NodeFaulty" not in {c.type for c in status(desired).conditions}

    def test_job_stays_and_says_so_if_there_are_no_other_nodes(self) -> None:
        observed = moving(THREE)
        desired = step(observed)
        assert verdict(desired, "NodeFaulty") == ("True", "NoOtherNodes")
        message = condition_of(desired, "NodeFaulty").message
        assert desired.scales == () and NODE in message
        assert len(set(message.split(": "))) == len(message.split(": ")), "the message repeats itself"
        trains = after(observed, desired)
        trains = replace(trains, report=report(trains, step=20))
        assert not needs_view(trains), "it goes on where it is"
        returned = step(replace(trains, left_out={}), 4000)
        assert verdict(returned, "NodeFaulty") == ("False", "Replanned")

    def test_job_that_stopped_waits_if_others_have_taken_the_other_nodes(self) -> None:
        """Fixed bug: it started on the faulty node again, and its other pods found no nodes."""
        observed = moving()
        leaving = step(observed)
        busy = replace(FIVE, nodes=tuple(replace(node, free_cpu=0.0) for node in FIVE.nodes))
        down = replace(stopped(after(observed, leaving)), view=busy)
        waiting = step(down, 10)
        assert verdict(waiting, "Admitted") == ("False", "NoPlan") and waiting.scales == ()
        assert "StatefulSet" not in kinds(waiting) and verdict(waiting, "Running") == ("False", "NotStarted")
        assert verdict(waiting, "NodeFaulty") == ("True", "Replanning")
        freed = replace(after(down, waiting), view=FIVE)
        assert needs_view(freed)
        new = step(freed, 20)
        assert verdict(new, "NodeFaulty") == ("False", "Replanned") and "StatefulSet" in kinds(new)
        assert plan_of(after(freed, new)).avoid == (NODE,)

    def test_job_that_stopped_waits_for_its_volume_with_a_plan_for_other_nodes(self) -> None:
        """Fixed bug: when its claim was usable again, the job started on the faulty node."""
        observed = moving()
        down = stopped(after(observed, step(observed)))
        wrong = {name: replace(claim, access_modes=("ReadWriteOnce",)) for name, claim in down.claims.items()}
        waiting = step(replace(down, claims=wrong), 10)
        assert verdict(waiting, "VolumeReady") == ("False", "ClaimNotShared") and "StatefulSet" not in kinds(waiting)
        back = replace(after(down, waiting), claims=down.claims)
        assert needs_view(back)
        new = step(back, 40)
        assert verdict(new, "NodeFaulty") == ("False", "Replanned")
        assert plan_of(after(back, new)).avoid == (NODE,)

    def test_job_with_a_pod_that_fits_no_node_may_use_a_node_that_has_returned(self) -> None:
        """Otherwise, its pods would avoid the node for good."""
        first = seen(DIGITS, FIVE, left_out=out())
        observed = settled(after(first, step(first)))
        observed = replace(observed, report=report(observed), view=FIVE)
        waiting = (replace(observed.pods[0], node=None, ready=False, unschedulable="0/5 nodes"), *observed.pods[1:])
        assert not needs_view(replace(observed, pods=waiting)), "the node is still left out"
        assert not needs_view(replace(observed, left_out={})), "no pod waits"
        freed = replace(observed, pods=waiting, left_out={})
        assert needs_view(freed)
        leaving = step(freed, 4000)
        assert verdict(leaving, "NodeFaulty") == ("True", "Replanning") and leaving.scales == DOWN
        assert NODE in condition_of(leaving, "NodeFaulty").message
        down = stopped(after(freed, leaving))
        again = settled(after(down, step(down, 4010)))
        assert plan_of(again).avoid is None and not needs_view(again)
        hopeless = step(replace(freed, view=nodes({"name": "n", "count": 2, "cpu": 2})), 4000)
        assert hopeless.scales == () and "NodeFaulty" not in {c.type for c in status(hopeless).conditions}

    def test_volume_that_the_other_nodes_cannot_mount_keeps_the_job(self) -> None:
        observed = moving(FIVE)
        claims = {name: ClaimSeen(name, "Bound", ("ReadWriteOnce",)) for name in observed.claims}
        desired = step(replace(observed, claims=claims))
        assert verdict(desired, "NodeFaulty") == ("True", "NoOtherNodes") and desired.scales == ()

    def test_suspended_and_edited_jobs_are_not_moved_but_planned_as_usual(self) -> None:
        assert step(changed(moving(), suspend=True)).status is not None
        assert verdict(step(changed(moving(), suspend=True)), "Suspended") == ("False", "Suspending")
        edited = step(changed(moving(), epochs=9))
        assert "the spec has changed" in condition_of(edited, "Running").message

    def test_node_that_is_not_ready_moves_no_job(self) -> None:
        """Its pods are fenced and replaced as before. A move would wait for the kubelet that is gone."""
        observed = replace(training(), view=FIVE, left_out=out(), lost_nodes={NODE: NOW}, failed_nodes={NODE: NOW})
        assert not needs_view(observed)

    def test_change_of_the_spec_ends_the_move(self) -> None:
        """Seen in a draft: the pods of the new plan were stopped again, because the condition was still there."""
        observed = moving()
        leaving = after(observed, step(observed))
        down = stopped(after(leaving, step(edited := changed(leaving, epochs=9))))
        down = replace(down, job=replace(edited.job, status=down.job.status))
        new = step(down, 10)
        assert verdict(new, "NodeFaulty") == ("False", "Replanned")
        running = settled(after(down, new))
        assert plan_of(running).avoid == (NODE,) and not needs_view(running)
        assert step(running, 20).scales == ()
