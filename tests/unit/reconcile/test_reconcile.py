"""Tests of the desired state from spec to pods, in consecutive situations."""

from dataclasses import replace

import pytest

from dlcontract import RunPhase
from dljob.api import Phase
from dljob.job.observed import ClaimSeen, ClassSeen
from dljob.reconcile import Scale, Target, needs_view
from support.builders import (
    CPUS,
    DIGITS,
    NOW,
    Json,
    after,
    changed,
    nodes,
    plan_of,
    report,
    seen,
    settled,
    without_spec,
)
from support.job_lifecycle import (
    DOWN,
    OUTCOME,
    condition_of,
    gone,
    kinds,
    nothing_done,
    started,
    status,
    step,
    training,
    verdict,
)


class TestNewJob:
    def test_objects_are_applied_in_order(self) -> None:
        desired = step(seen())
        assert kinds(desired) == [
            "ServiceAccount", "Role", "RoleBinding", "ConfigMap", "ConfigMap", "ConfigMap", "Service",
            "NetworkPolicy", "PersistentVolumeClaim", "StatefulSet",
        ]  # fmt: skip
        assert desired.secret == "digits-tls-6f1c2f36"
        assert (desired.scales, desired.deletes, desired.delete_job) == ((), (), False)

    def test_status_shows_the_plan(self) -> None:
        desired = step(seen())
        found = status(desired)
        assert (found.phase, found.nodes, found.ready, found.observed_generation) == (Phase.STARTING, 3, "0/3", 1)
        assert found.plan is not None
        assert (found.plan.number, found.plan.summary) == (1, "3 x cpu, Ring, 32+32+32")
        assert found.start_time == NOW
        assert [(g.name, g.replicas, g.ready) for g in found.groups] == [("cpu", 3, 0)]
        assert verdict(desired, "Accepted") == ("True", "Accepted")
        assert verdict(desired, "Planned") == ("True", "Planned")
        assert verdict(desired, "VolumeReady") == ("Unknown", "Binding")
        assert verdict(desired, "Running") == ("False", "Starting")
        assert [event.reason for event in desired.events] == ["Planned"]

    def test_plan_survives_a_restart_of_the_operator(self) -> None:
        first = seen()
        assert needs_view(first)
        second = after(first, step(first))
        assert not needs_view(second)
        without = replace(second, view=None)
        assert plan_of(after(without, step(without))) == plan_of(second)

    def test_job_waits_for_ready_pods(self) -> None:
        desired = step(started())
        assert (status(desired).phase, status(desired).ready) == (Phase.STARTING, "3/3")
        assert verdict(desired, "PodsReady") == ("True", "AllReady")
        assert (desired.scales, desired.deletes) == ((), ())
        assert "StatefulSet" not in kinds(desired), "the current template is not applied again"
        assert "PersistentVolumeClaim" not in kinds(desired), "the spec of a claim is immutable"

    def test_statefulset_scaled_by_hand_is_scaled_back(self) -> None:
        observed = started()
        fewer = replace(observed, sets=(replace(observed.sets[0], replicas=2),))
        assert step(fewer).scales == (Scale("digits-cpu", 3, "uid-digits-cpu"),)

    def test_deleted_plan_config_map_is_restored(self) -> None:
        observed = replace(started(), plan=None)
        assert needs_view(observed)
        leaving = step(observed)
        assert leaving.scales == DOWN, "the running pods may use another plan"
        away = after(observed, leaving)
        assert status(step(away)) == status(leaving), "a status that changes when it is read would be written endlessly"
        empty = settled(away)
        assert plan_of(after(empty, step(empty))).plan == plan_of(started()).plan

    def test_deleted_plan_that_cannot_be_restored_gets_the_next_number(self) -> None:
        two = nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi"})
        observed = replace(started({**DIGITS, "nodes": {"min": 2}}), plan=None, view=two)
        away = after(observed, step(observed))
        assert status(step(away)) == status(step(observed))
        empty = settled(away)
        assert plan_of(after(empty, step(empty))).plan.number == 2


class TestPlanOnly:
    SPEC: Json = {**DIGITS, "planning": {"mode": "PlanOnly"}}

    def test_plan_is_shown_and_nothing_is_created(self) -> None:
        desired = step(seen(self.SPEC))
        assert nothing_done(desired)
        assert status(desired).phase is Phase.PLANNED
        assert verdict(desired, "Planned") == ("True", "PlanOnly")
        assert status(desired).plan is not None
        assert status(desired).ready == "0/0"

    def test_job_is_planned_once(self) -> None:
        first = seen(self.SPEC)
        second = after(first, step(first))
        assert not needs_view(second)
        assert needs_view(changed(second, epochs=6))

    def test_mode_auto_runs_the_plan(self) -> None:
        first = seen(self.SPEC)
        run = changed(after(first, step(first)), planning={"mode": "Auto"})
        assert kinds(step(run))[-1] == "StatefulSet"

    def test_plan_only_stops_the_pods_of_a_running_job(self) -> None:
        observed = changed(training(), planning={"mode": "PlanOnly"})
        assert step(observed).scales == DOWN

    def test_plan_is_shown_after_a_time_without_a_plan(self) -> None:
        nowhere = replace(seen(self.SPEC), view=nodes(), place=(1, 1))
        waiting = after(nowhere, step(nowhere))
        assert (status(step(nowhere)).phase, verdict(step(nowhere), "Planned")[0]) == (Phase.PENDING, "False")
        assert not any(c.type == "Admitted" for c in status(step(nowhere)).conditions), "a job in no queue"
        assert status(step(replace(waiting, view=seen().view))).phase is Phase.PLANNED

    def test_plan_is_shown_for_a_job_that_waited_in_mode_auto(self) -> None:
        nowhere = replace(seen(), view=nodes(), place=(1, 1))
        waiting = after(nowhere, step(nowhere))
        shown = step(changed(replace(waiting, view=seen().view), planning={"mode": "PlanOnly"}))
        assert nothing_done(shown) and status(shown).phase is Phase.PLANNED
        assert verdict(shown, "Admitted") == ("False", "PlanOnly")


class TestBadSpecs:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"globalBatchSize": 0}, "spec.globalBatchSize: found 0"),
            ({"nodes": {"min": 4, "max": 2}}, "spec.nodes.min must not be larger than max"),
            ({"seed": -1}, "spec.seed: found -1"),
        ],
    )
    def test_invalid_spec_creates_nothing(self, changes: Json, words: str) -> None:
        observed = seen({**DIGITS, **changes})
        assert not needs_view(observed)
        desired = step(observed)
        assert nothing_done(desired)
        assert status(desired).phase is Phase.PENDING
        assert verdict(desired, "Accepted") == ("False", "InvalidSpec")
        assert words in condition_of(desired, "Accepted").message
        assert [(event.type, event.reason) for event in desired.events] == [("Warning", "InvalidSpec")]

    def test_invalid_change_does_not_affect_the_run(self) -> None:
        desired = step(changed(training(), globalBatchSize=0))
        assert nothing_done(desired)
        assert verdict(desired, "Accepted") == ("False", "InvalidSpec")
        assert (status(desired).phase, status(desired).ready) == (Phase.RUNNING, "3/3")

    def test_name_too_long_for_pods_is_rejected(self) -> None:
        desired = step(seen(name="d" * 41))
        assert nothing_done(desired)
        assert "at most 40" in condition_of(desired, "Accepted").message

    def test_infeasible_plan_names_field_and_remedy_and_is_retried(self) -> None:
        desired = step(seen({**DIGITS, "devices": ["H100"]}))
        assert nothing_done(desired)
        assert (status(desired).phase, status(desired).plan) == (Phase.PENDING, None)
        assert verdict(desired, "Planned") == ("False", "NoSuchDevice")
        assert condition_of(desired, "Planned").message.startswith("spec.devices")
        assert desired.requeue_after_s is not None and desired.requeue_after_s > 0

    def test_infeasible_change_does_not_affect_the_run(self) -> None:
        observed = changed(training(), nodes={"min": 9})
        assert needs_view(observed)
        desired = step(observed)
        assert (desired.scales, desired.deletes) == ((), ())
        assert verdict(desired, "Planned")[0] == "False"
        assert "the job continues with plan 1" in condition_of(desired, "Planned").message

    def test_job_with_too_few_nodes_is_planned_when_nodes_appear(self) -> None:
        few = seen(view=nodes({"name": "n", "count": 1, "cpu": 2, "memory": "4Gi"}))
        waiting = after(few, step(few))
        assert kinds(step(replace(waiting, view=CPUS)))[-1] == "StatefulSet"


class TestVolumes:
    @pytest.mark.parametrize(
        ("checkpoint", "observed", "expected", "blocked"),
        [
            ({"enabled": False}, {"classes": ()}, ("True", "NotNeeded"), False),
            ({"uri": "s3://models/a"}, {"classes": ()}, ("True", "NotNeeded"), False),
            ({}, {"classes": ()}, ("False", "NoDefaultStorageClass"), True),
            ({}, {"classes": None}, ("Unknown", "Binding"), False),
            ({"volume": {"storageClassName": "fast"}}, {}, ("False", "StorageClassNotFound"), True),
            ({"volume": {"claimName": "mine"}}, {}, ("False", "ClaimNotFound"), True),
            (
                {"volume": {"claimName": "mine"}},
                {"claims": {"mine": ClaimSeen("mine", "Bound", ("ReadWriteOnce",))}},
                ("False", "ClaimNotShared"),
                True,
            ),
            (
                {"volume": {"claimName": "mine"}},
                {"claims": {"mine": ClaimSeen("mine", "Bound", ("ReadWriteMany",))}},
                ("True", "Bound"),
                False,
            ),
            (
                {"volume": {"claimName": "mine"}},
                {"claims": {"mine": ClaimSeen("mine", "Pending", ("ReadWriteMany",), "nfs", problem="quota")}},
                ("False", "ProvisioningFailed"),
                False,
            ),
        ],
    )  # fmt: skip
    def test_pods_wait_for_a_volume_only_if_it_can_be_bound(
        self, checkpoint: Json, observed: Json, expected: tuple[str, str], blocked: bool
    ) -> None:
        desired = step(seen({**DIGITS, "checkpoint": checkpoint}, **observed))
        assert verdict(desired, "VolumeReady") == expected
        assert ("StatefulSet" in kinds(desired)) is not blocked
        assert status(desired).phase is (Phase.PENDING if expected[0] == "False" and blocked else Phase.STARTING)

    @pytest.mark.parametrize(
        ("volume", "wanted", "mode", "says"),
        [
            ({}, {"min": 1, "max": 1}, "ReadWriteOnce", False),
            ({}, {"min": 1, "max": 8}, "ReadWriteOnce", True),
            ({"shared": False}, {"min": 1, "max": 8}, "ReadWriteOnce", True),
            ({"shared": True}, {"min": 1, "max": 8}, "ReadWriteMany", False),
        ],
    )
    def test_job_that_starts_on_one_node_learns_before_it_trains_that_its_claim_keeps_it_there(
        self, volume: Json, wanted: Json, mode: str, says: bool
    ) -> None:
        first = seen({**DIGITS, "checkpoint": {"volume": volume}, "nodes": wanted}, nodes({"name": "n", "cpu": 2}))
        desired = step(first)
        (claim,) = (item for item in desired.objects if item["kind"] == "PersistentVolumeClaim")
        assert claim["spec"]["accessModes"] == [mode]
        for found in (desired, step(after(first, desired))):
            message = condition_of(found, "VolumeReady").message
            assert ("spec.checkpoint.volume.shared: true" in message) is says, message

    def test_missing_dataset_claim_is_reported(self) -> None:
        desired = step(seen({**DIGITS, "dataset": {"uri": "pvc://corpus/a.npz", "samples": 100}}))
        assert verdict(desired, "VolumeReady") == ("False", "DatasetClaimNotFound")
        assert "'corpus'" in condition_of(desired, "VolumeReady").message
        assert nothing_done(desired)

    @pytest.mark.parametrize(
        ("claims", "expected"),
        [
            ({}, ("False", "DatasetClaimNotFound")),
            ({"cache": ClaimSeen("cache", "Bound", ("ReadOnlyMany",))}, ("False", "DatasetClaimNotShared")),
            ({"cache": ClaimSeen("cache", "Bound", ("ReadWriteMany",))}, ("True", "NotNeeded")),
        ],
        ids=["missing", "read-only", "shared"],
    )
    def test_state_of_the_dataset_cache_is_reported(
        self, claims: dict[str, ClaimSeen], expected: tuple[str, str]
    ) -> None:
        data = {"uri": "http://a/b.npz", "samples": 100, "cacheClaimName": "cache"}
        spec = {**DIGITS, "dataset": data, "checkpoint": {"enabled": False}}
        desired = step(seen(spec, claims=claims))
        assert verdict(desired, "VolumeReady") == expected
        assert expected[0] == "True" or "spec.dataset.cacheClaimName" in condition_of(desired, "VolumeReady").message

    def test_storage_class_created_later_is_used(self) -> None:
        first = seen(classes=())
        waiting = after(first, step(first))
        assert kinds(step(replace(waiting, classes=(ClassSeen("shared", default=True),))))[-1] == "StatefulSet"


class TestSuspend:
    def test_job_is_suspended_and_resumed(self) -> None:
        observed = changed(training(), suspend=True)
        leaving = step(observed)
        assert leaving.scales == DOWN
        assert verdict(leaving, "Suspended") == ("False", "Suspending")
        assert status(leaving).phase is not Phase.SUSPENDED, "pods are still running"

        without_pods = gone(observed)
        suspended = step(without_pods)
        assert (suspended.scales, suspended.objects) == ((), ())
        assert verdict(suspended, "Suspended") == ("True", "Suspended")
        assert (status(suspended).phase, status(suspended).ready) == (Phase.SUSPENDED, "0/0")

        resumed = changed(after(without_pods, suspended), suspend=False)
        assert needs_view(resumed), "the cluster may have changed"
        back = step(resumed)
        assert verdict(back, "Suspended") == ("False", "NotSuspended")
        assert [s.replicas for s in after(resumed, back).sets] == [3]
        assert plan_of(after(resumed, back)) == plan_of(observed)
        assert status(back).phase is Phase.STARTING

    def test_job_created_suspended_is_not_planned(self) -> None:
        observed = seen({**DIGITS, "suspend": True})
        assert not needs_view(observed)
        desired = step(observed)
        assert nothing_done(desired)
        assert (status(desired).phase, status(desired).plan) == (Phase.SUSPENDED, None)


class TestChanges:
    def test_old_pods_stop_before_pods_of_the_next_plan_start(self) -> None:
        observed = changed(training(step=0), globalBatchSize=192)
        assert needs_view(observed)
        leaving = step(observed)
        assert (leaving.scales, leaving.objects) == (DOWN, ())
        assert verdict(leaving, "Running") == ("False", "Replacing")
        assert plan_of(after(observed, leaving)).plan.number == 1, "the plan is not replaced while pods are running"

        zero = after(observed, leaving)
        still = step(zero)
        assert (still.scales, still.objects) == ((), ()), "pods are still terminating"

        empty = settled(zero)
        for later in ({"reconciled": False}, {"made_replicas": 1}):
            late = replace(empty, sets=tuple(replace(item, **later) for item in empty.sets))
            assert step(late).objects == (), "the StatefulSet controller may still create a pod"
        back = step(empty)
        found = plan_of(after(empty, back))
        assert (found.plan.number, found.plan.global_batch) == (2, 192)
        assert [s.replicas for s in after(empty, back).sets] == [3]
        plan = status(back).plan
        assert plan is not None
        assert (plan.number, status(back).observed_generation) == (2, 2)
        settled_again = settled(after(empty, back))
        assert not needs_view(settled_again)
        assert step(settled_again).scales == ()

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            (
                {"globalBatchSize": 192},
                "spec.globalBatchSize: found 192; expected 96, as in the job's checkpoint of step 7",
            ),
            ({"seed": 3}, "spec.seed: found 3; expected 0"),
            ({"model": {"name": "mlp"}}, "spec.model.name: found mlp; expected digits-cnn"),
        ],
    )
    def test_change_that_contradicts_the_checkpoint_is_rejected(self, changes: Json, field: str) -> None:
        """The plan is of release 0.2. ``test_spec_changes`` has the tests of plans that contain their spec."""
        running = without_spec(training(last_checkpoint={"step": 7, "unix_s": 1.0}))
        observed = changed(running, **changes)
        desired = step(observed)
        assert verdict(desired, "Planned") == ("False", "CheckpointContradicted")
        assert condition_of(desired, "Planned").message.startswith(field)
        assert "the job continues with plan 1" in condition_of(desired, "Planned").message
        assert status(desired).phase is Phase.RUNNING
        assert (desired.scales, desired.deletes) == ((), ())
        back = changed(after(observed, desired), **{key: running.job.spec.get(key, 0) for key in changes})
        assert verdict(step(back), "Planned") == ("True", "Planned")

    def test_old_report_does_not_end_the_new_plan(self) -> None:
        observed = changed(training(step=0), globalBatchSize=192)
        empty = settled(after(observed, step(observed)))
        new = settled(after(empty, step(empty)))
        old = replace(new, report=report(observed, RunPhase.SUCCEEDED, outcome=OUTCOME))
        assert status(step(old)).phase is Phase.STARTING

    def test_statefulsets_of_removed_groups_are_deleted(self) -> None:
        view = nodes({"name": "n", "count": 2, "cpu": 2}, {"name": "f", "count": 2, "cpu": 4, "device": "cpu-fast"})
        both = [{"device": "cpu", "nodes": 1}, {"device": "cpu-fast", "nodes": 1}]
        fixed = {**DIGITS, "nodes": {}, "planning": {"mode": "Fixed", "groups": both}}
        first = started(fixed, view=view)
        assert {s.name for s in first.sets} == {"digits-cpu", "digits-cpu-fast"}
        observed = changed(first, planning={"mode": "Fixed", "groups": both[:1]})
        empty = settled(after(observed, step(observed)))
        back = step(empty)
        assert back.deletes == (Target("StatefulSet", "digits-cpu-fast", "uid-digits-cpu-fast"),)
        assert [(s.name, s.replicas) for s in after(empty, back).sets] == [("digits-cpu", 1)]

    @pytest.mark.parametrize(
        "changes", [{"runPolicy": {"ttlSecondsAfterFinished": 5}}, {"runPolicy": {"nodeLostSeconds": 30}}]
    )
    def test_limits_change_without_a_restart(self, changes: Json) -> None:
        observed = changed(training(), **changes)
        assert not needs_view(observed)
        assert step(observed).scales == ()

    def test_new_template_first_scales_to_zero(self) -> None:
        observed = changed(training(), trainer={"env": [{"name": "A", "value": "b"}]})
        assert step(observed).scales == DOWN
