"""Tests of changes of an existing job's spec that the API server has admitted: what the operator follows and reports."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dlcontract import PLAN_KEY, RunPhase
from dljob.api import Phase
from dljob.api.changes import planned_fields
from dljob.job.observed import Observed
from dljob.job.plan.stored import OPERATOR_KEY
from dljob.reconcile import needs_view, parse_observed
from support.builders import DIGITS, Json, after, changed, nodes, plan_of, planned, report, settled, without_spec
from support.job_lifecycle import DOWN, condition_of, done, gone, nothing_done, status, step, training, verdict

SAVED = {"step": 7, "unix_s": 1.0}
NOT_A_FIT: dict[str, tuple[Json, str]] = {
    "another optimizer": ({"optimizer": {"name": "Adam"}}, "spec.optimizer.name: found Adam; expected SGD"),
    "another model": ({"model": {"name": "mlp"}}, "spec.model.name: found mlp; expected digits-cnn"),
    "other data": ({"dataset": {"name": "wine"}}, "spec.dataset.name: found wine; expected digits"),
    "another batch": ({"globalBatchSize": 192}, "spec.globalBatchSize: found 192; expected 96"),
    "another seed": ({"seed": 3}, "spec.seed: found 3; expected 0"),
    "another volume": (
        {"checkpoint": {"volume": {"claimName": "new"}}},
        "spec.checkpoint.volume.claimName: found new; expected no value",
    ),
    "without checkpoints": (
        {"seed": 3, "checkpoint": {"enabled": False}}, "spec.seed: found 3; expected 0",
    ),
}  # fmt: skip


def put(observed: Observed, spec: Mapping[str, Any]) -> Observed:
    """Return the job after the user replaced its spec."""
    return replace(observed, job=replace(observed.job, spec=spec, generation=observed.job.generation + 1))


class TestRunningJob:
    @pytest.mark.parametrize("case", NOT_A_FIT)
    @pytest.mark.parametrize("begun", [{"last_checkpoint": SAVED}, {"step": 1}], ids=["checkpoint", "first step"])
    def test_change_that_contradicts_the_training_is_refused(self, case: str, begun: Json) -> None:
        """Earlier, the pods stopped. The new ones rejected the checkpoint and the job failed, or it lost its progress."""
        changes, words = NOT_A_FIT[case]
        running = training(**begun)
        observed = changed(running, **changes)
        assert not needs_view(observed), "there is nothing to plan"
        desired = step(observed)
        assert verdict(desired, "Accepted") == ("False", "ChangeRefused")
        message = condition_of(desired, "Accepted").message
        assert message.startswith(words) and "Restore the former value" in message
        assert message.endswith("The job continues with the spec of plan 1")
        assert [(e.type, e.reason) for e in desired.events] == [("Warning", "ChangeRefused")]
        assert (desired.scales, desired.deletes, status(desired).phase) == ((), (), Phase.RUNNING)
        assert desired.objects == step(running).objects, "all objects are those of the accepted spec"
        back = step(put(after(observed, desired), running.job.spec))
        assert verdict(back, "Accepted") == ("True", "Accepted") and back.objects == desired.objects

    def test_refused_spec_is_not_used_when_pods_start_again(self) -> None:
        running = training(last_checkpoint=SAVED)
        observed = changed(running, seed=3, trainer={"image": "registry.example/other:1"}, suspend=True)
        assert step(observed).scales == DOWN, "a job can be suspended whatever its spec"
        left = settled(after(observed, step(observed)))
        resumed = put(left, {**left.job.spec, "suspend": False})
        sets = [m for m in step(resumed).objects if m["kind"] == "StatefulSet"]
        assert len(sets) == 1 and "registry.example/other:1" not in json.dumps(sets)
        assert plan_of(after(resumed, step(resumed))).plan.number == 1

    def test_limits_change_in_spite_of_a_refused_change(self) -> None:
        observed = changed(training(last_checkpoint=SAVED), seed=3, runPolicy={"activeDeadlineSeconds": 100})
        assert verdict(step(observed, 99), "Accepted") == ("False", "ChangeRefused")
        assert verdict(step(observed, 101), "Failed") == ("True", "DeadlineExceeded")

    @pytest.mark.parametrize(
        ("stop", "words"),
        [({"suspend": True}, "suspend: true"), ({"planning": {"mode": "PlanOnly"}}, "planning.mode: PlanOnly")],
    )
    def test_refusal_says_that_the_pods_stop_if_the_same_change_stops_them(self, stop: Json, words: str) -> None:
        """Fixed bug: it said that the job continues, although its pods stopped."""
        desired = step(changed(training(last_checkpoint=SAVED), seed=3, **stop))
        assert desired.scales == DOWN
        message = condition_of(desired, "Accepted").message
        assert message.endswith(f"Its pods stop ({words}). In all else, the job keeps the spec of plan 1")

    def test_another_refused_change_is_another_event(self) -> None:
        observed = changed(training(last_checkpoint=SAVED), seed=3)
        told = after(observed, step(observed))
        assert step(told).events == ()
        (event,) = step(changed(told, seed=4)).events
        assert "spec.seed: found 4" in event.message

    def test_change_before_the_status_shows_the_first_step(self) -> None:
        """The report and the user's change arrive together."""
        early = training(step=0)
        observed = changed(replace(early, report=report(early, step=5)), seed=3)
        assert verdict(step(observed), "Accepted") == ("False", "ChangeRefused")

    def test_change_before_the_first_step_is_refused_if_the_stopping_pods_write_a_checkpoint(self) -> None:
        early = training(step=0)
        observed = changed(early, seed=3)
        assert step(observed).scales == DOWN
        stopping = after(observed, step(observed))
        left = replace(settled(stopping), report=report(stopping, RunPhase.STOPPED, step=2, last_checkpoint=SAVED))
        desired = step(left)
        assert verdict(desired, "Accepted") == ("False", "ChangeRefused")
        new = after(left, desired)
        assert (plan_of(new).plan.number, plan_of(new).plan.seed) == (1, 0)
        assert [item.replicas for item in new.sets] == [3]

    def test_everything_may_change_before_the_first_step(self) -> None:
        observed = changed(training(step=0), model={"name": "mlp"}, seed=3)
        empty = settled(after(observed, step(observed)))
        new = plan_of(after(empty, step(empty))).plan
        assert (new.number, new.model.name, new.seed) == (2, "mlp", 3)

    def test_everything_may_change_without_checkpoints(self) -> None:
        spec = {**DIGITS, "checkpoint": {"enabled": False}}
        observed = changed(training(spec), seed=3)
        assert verdict(step(observed), "Accepted") == ("True", "Accepted")
        empty = settled(after(observed, step(observed)))
        assert plan_of(after(empty, step(empty))).plan.seed == 3

    def test_other_changes_take_effect_from_the_checkpoint(self) -> None:
        observed = changed(training(last_checkpoint=SAVED), nodes={"min": 2, "max": 2}, epochs=9)
        assert verdict(step(observed), "Accepted") == ("True", "Accepted")
        empty = settled(after(observed, step(observed)))
        plan = plan_of(after(empty, step(empty))).plan
        assert (plan.number, plan.epochs, len(plan.ranks)) == (2, 9, 2)


class TestEndedJob:
    def ended(self, phase: RunPhase = RunPhase.SUCCEEDED) -> Observed:
        observed = gone(done(phase))
        return after(observed, step(observed))

    @pytest.mark.parametrize("phase", [RunPhase.SUCCEEDED, RunPhase.FAILED])
    @pytest.mark.parametrize("changes", [{"epochs": 9}, {"seed": 3}, {"nodes": {"min": 2}}])
    def test_change_has_no_effect_and_is_reported(self, phase: RunPhase, changes: Json) -> None:
        observed = changed(before := self.ended(phase), **changes)
        desired = step(observed)
        assert nothing_done(desired)
        assert verdict(desired, "Accepted") == ("False", "JobEnded")
        message = condition_of(desired, "Accepted").message
        assert message.startswith(f"spec.{next(iter(changes))}: found a change after the job has ended")
        assert "Create a new job" in message
        assert [(e.type, e.reason) for e in desired.events] == [("Warning", "JobEnded")]
        assert status(desired).phase is status(step(before)).phase
        again = step(after(observed, desired))
        assert again.events == () and verdict(again, "Accepted") == ("False", "JobEnded")
        back = step(put(after(observed, desired), before.job.spec))
        assert verdict(back, "Accepted") == ("True", "Accepted")

    def test_time_to_live_takes_effect(self) -> None:
        observed = changed(self.ended(), runPolicy={"ttlSecondsAfterFinished": 60})
        assert verdict(step(observed), "Accepted") == ("True", "Accepted")
        assert not step(observed).delete_job and step(observed, 61).delete_job

    def test_change_that_never_took_effect_is_no_news_at_the_end(self) -> None:
        infeasible = changed(training(), nodes={"min": 30})
        running = after(infeasible, step(infeasible))
        over = replace(running, report=report(running, RunPhase.SUCCEEDED))
        desired = step(over)
        assert verdict(desired, "Accepted") == ("True", "Accepted")
        assert verdict(step(after(over, desired)), "Accepted") == ("True", "Accepted")


class TestPlanOfAnEarlierRelease:
    def test_it_stays_in_force_unchanged(self) -> None:
        running = without_spec(training(last_checkpoint=SAVED))
        desired = step(running)
        assert (desired.scales, desired.deletes) == ((), ()) and verdict(desired, "Accepted") == ("True", "Accepted")
        assert [m["data"] for m in desired.objects if PLAN_KEY in m.get("data", {})] == [running.plan]

    def test_change_of_an_ended_job_has_no_effect(self) -> None:
        over = gone(done())
        observed = changed(without_spec(after(over, step(over))), epochs=9)
        assert nothing_done(step(observed)) and step(observed).events == ()

    @pytest.mark.parametrize("spec", [{"globalBatchSize": "many"}, {"mascot": "gopher"}])
    def test_spec_that_this_release_cannot_read_is_not_compared(self, spec: Json) -> None:
        running = training(last_checkpoint=SAVED)
        assert running.plan is not None
        mine = json.loads(running.plan[OPERATOR_KEY]) | {"spec": spec}
        observed = changed(replace(running, plan={**running.plan, OPERATOR_KEY: json.dumps(mine)}), epochs=9)
        assert parse_observed(observed).refusal is None


def test_plan_stores_the_fields_on_which_it_depends() -> None:
    observed = training({**DIGITS, "suspend": False, "runPolicy": {"ttlSecondsAfterFinished": 5, "backoffLimit": 1}})
    spec = parse_observed(observed).spec
    assert spec is not None
    assert plan_of(observed).spec == planned_fields(spec) == {**DIGITS, "runPolicy": {"backoffLimit": 1}}


class TestSamePods:
    """A change of the spec after which the pods would be the same."""

    SPEC: Json = {**DIGITS, "nodes": {"min": 3, "max": 3}}

    @pytest.mark.parametrize(
        "changes",
        [{"nodes": {"min": 3, "max": 4}}, {"devices": ["cpu"]}, {"objective": {"minimize": "Energy"}}],
        ids=str,
    )
    def test_they_run_on(self, changes: Json) -> None:
        """Fixed bug: a larger nodes.max stopped all pods, and started the same ones again."""
        running = training(self.SPEC)
        observed = changed(running, **changes)
        desired = step(observed)
        assert (desired.scales, desired.deletes) == ((), ())
        assert verdict(desired, "Running")[0] == "True" and status(desired).phase is Phase.RUNNING
        stored = after(observed, desired)
        assert plan_of(stored).spec_digest != plan_of(running).spec_digest
        assert plan_of(stored).plan == plan_of(running).plan, "the agents see no change"
        [old], [new] = running.sets, stored.sets
        assert new.spec_digest == plan_of(stored).revision != old.spec_digest
        again = step(replace(stored, pods=running.pods, report=running.report))
        assert (again.scales, again.deletes) == ((), ()) and not needs_view(stored)
        assert status(again).phase is Phase.RUNNING

    def test_requests_of_running_pods_stay(self) -> None:
        """The CPUs that a new plan gives to pods depend on what others leave free."""
        running = training(self.SPEC)
        busy = nodes({"name": "n", "count": 3, "cpu": 1.7, "memory": "4Gi"})
        observed = replace(changed(running, nodes={"min": 3, "max": 4}), view=busy)
        assert planned(observed).cpu_m != plan_of(running).cpu_m
        desired = step(observed)
        assert (desired.scales, desired.deletes) == ((), ())
        assert plan_of(after(observed, desired)).cpu_m == plan_of(running).cpu_m

    @pytest.mark.parametrize(
        "changes",
        [
            {"nodes": {"min": 2, "max": 2}},
            {"resources": {"memory": "3Gi"}},
            {"scheduling": {"nodeSelector": {"a": "b"}}},
        ],
        ids=str,
    )
    def test_other_pods_replace_them(self, changes: Json) -> None:
        view = nodes({"name": "n", "count": 3, "cpu": 4, "memory": "8Gi", "labels": {"a": "b"}})
        observed = replace(changed(training(self.SPEC), **changes), view=view)
        assert step(observed).scales == DOWN
