"""Tests of running jobs with a deadline that minimize energy or cost: they move when they are late or early."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlcontract import RunPhase
from dljob.api import DLJobStatus
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Learned, LearnedPoint
from dljob.planner.types.texts import duration
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning import make_plan
from dljob.reconcile.planning.deadlines import deadline_of
from dljob.reconcile.planning.make_plan import question
from dljob.reconcile.planning.rest import with_pace
from dljob.scheduling import pace_changed
from support.builders import CONFIG, DIGITS, NOW, Json, after, changed, plan_of, report, seen, settled
from support.job_lifecycle import condition_of, status, step, verdict

HALF_FIXED = Learned(
    (LearnedPoint(32, 0.1, 50), LearnedPoint(48, 0.1125, 50), LearnedPoint(96, 0.15, 50)),
    link_latency_s=1e-5, link_bandwidth_Bps=1e9,
)  # fmt: skip
"""One node needs 0.15 s for a step, and three need 0.1 s and therefore twice the energy."""
STEPS = 200_000
VOLUME: Json = {"checkpoint": {"volume": {"storageClassName": "shared", "shared": True}}}
ONE_S = 0.15 * STEPS
"""Predicted seconds of the training on one node."""


def job(minimize: str = "Energy", deadline_s: float | None = 1.5 * ONE_S, **spec: Any) -> Json:
    """Return a spec whose volume many nodes can write to: a plan with one node must be able to grow."""
    base = {key: value for key, value in DIGITS.items() if key != "epochs"}
    goal = {"minimize": minimize} | ({} if deadline_s is None else {"deadline": f"{deadline_s:.0f}s"})
    return base | {"steps": STEPS, "nodes": {"min": 1, "max": 3}, "objective": goal} | VOLUME | spec


def trains(spec: Json, at_s: float, **fields: Any) -> Observed:
    """Return a job that has trained until ``at_s`` seconds after its creation."""
    first = seen(spec)
    parsed = parse_observed(first)
    assert parsed.spec is not None
    first = replace(first, learned={(profile_key(parsed.spec), "cpu"): HALF_FIXED})
    observed = settled(after(first, step(first)))
    observed = after(observed, step(observed, 5.0))
    return reports(observed, at_s, **fields)


def reports(observed: Observed, at_s: float, **fields: Any) -> Observed:
    found = {"steps": STEPS, "last_checkpoint": {"step": fields["step"], "unix_s": NOW.timestamp()}, **fields}
    observed = replace(observed, report=report(observed, **found))
    return after(observed, step(observed, at_s))


def looks(observed: Observed) -> Observed:
    return replace(observed, capacity_grew=True)


def test_late_job_moves_to_more_nodes_and_meets_its_deadline() -> None:
    """Half of the time has passed, and a third of the steps is done, because a device has become slow."""
    observed = trains(job(), 0.75 * ONE_S, step=STEPS // 3, step_s=0.225)
    assert plan_of(observed).nodes == 1
    assert verdict(step(observed, 0.75 * ONE_S), "DeadlineAtRisk") == ("True", "PredictedLate")
    decided = step(looks(observed), 0.75 * ONE_S)
    assert verdict(decided, "Resizing") == ("True", "DeadlineAtRisk"), condition_of(decided, "Resizing").message
    assert "are left to the deadline" in condition_of(decided, "Resizing").message
    going = replace(after(observed, decided), capacity_grew=False)
    leaving = step(going, 0.75 * ONE_S + 1)
    assert [scale.replicas for scale in leaving.scales] == [0]
    stopped = replace(after(going, leaving), pods=())
    stopped = replace(stopped, report=report(stopped, RunPhase.STOPPED, step=STEPS // 3, steps=STEPS))
    there = after(stopped, step(stopped, 0.75 * ONE_S + 30))
    assert plan_of(there).nodes > 1
    there = reports(settled(there), 0.75 * ONE_S + 60, step=STEPS // 3 + 30, step_s=0.1)
    assert verdict(step(there, 0.75 * ONE_S + 61), "DeadlineAtRisk") == ("False", "OnTime")


def test_early_job_moves_to_fewer_nodes_with_less_energy() -> None:
    """The deadline needed three nodes for the whole training. Of the steps that are left, one node is fast enough."""
    spec = job(deadline_s=0.8 * ONE_S)
    observed = trains(spec, 0.1 * ONE_S, step=STEPS * 6 // 10, step_s=0.1)
    assert plan_of(observed).nodes > 1
    decided = step(looks(observed), 0.1 * ONE_S)
    found = condition_of(decided, "Resizing")
    assert (found.status.value, found.reason) == ("True", "BetterPlan"), found.message
    assert "to 1 x cpu" in found.message and " J with the other, " in found.message
    fast = reports(observed, 0.1 * ONE_S, step=STEPS * 6 // 10, step_s=0.025)
    assert verdict(step(looks(fast), 0.1 * ONE_S), "Resizing") == ("False", "NotWorthwhile"), "it uses less as it is"


@pytest.mark.parametrize("minimize", ["Energy", "Cost"])
def test_job_on_schedule_stays(minimize: str) -> None:
    observed = trains(job(minimize), 0.3 * ONE_S, step=STEPS * 3 // 10, step_s=0.15)
    assert not needs_view(observed)
    stays = step(looks(observed), 0.3 * ONE_S)
    assert verdict(stays, "Resizing") == ("False", "NotWorthwhile") and stays.scales == ()
    assert verdict(stays, "DeadlineAtRisk") == ("False", "OnTime")
    forecast = status(stays).forecast
    assert forecast is not None and forecast.deadline_slack_seconds is not None
    assert 0 < forecast.deadline_slack_seconds < 1.2 * ONE_S


def test_contradicted_plan_for_energy_is_planned_again() -> None:
    observed = trains(job(deadline_s=None), 1000.0, step=2000, step_s=1.0)
    assert verdict(step(observed, 1100.0), "PlanContradicted") == ("True", "SlowerThanPredicted")


def test_question_does_not_change_while_the_job_is_on_schedule() -> None:
    """Otherwise, the planner would be asked anew in each reconcile, and its answer would never fit."""
    observed = trains(job(), 0.3 * ONE_S, step=STEPS * 3 // 10, step_s=0.15)
    paces = {with_pace(parse_observed(observed), NOW + timedelta(seconds=0.3 * ONE_S + s)).pace_s for s in range(20)}
    assert len(paces) == 1
    asked = with_pace(parse_observed(observed), NOW + timedelta(seconds=0.3 * ONE_S))
    assert question(asked).pace_s == asked.pace_s is not None


def test_finish_by_counts_for_the_first_plan() -> None:
    due = (NOW + timedelta(seconds=0.75 * ONE_S)).isoformat()
    tight = seen(job(deadline_s=None, scheduling={"finishBy": due}))
    parsed = parse_observed(tight)
    assert parsed.spec is not None
    tight = replace(tight, learned={(profile_key(parsed.spec), "cpu"): HALF_FIXED})
    assert plan_of(after(tight, step(tight))).nodes > 1
    loose = replace(tight, job=replace(tight.job, spec=job(deadline_s=None)))
    assert plan_of(after(loose, step(loose))).nodes == 1


class TestEvaluations:
    """The trainer evaluates after each step, because a batch has all samples. This takes a third of the time."""

    EACH = Learned((LearnedPoint(104, 0.138, 50), LearnedPoint(256, 0.14, 50), LearnedPoint(1437, 0.15, 50)))
    STEPS = 20_000
    STEPS_S = 0.15 * STEPS

    def half_done(self, left_s: float, minimize: str = "Energy") -> Observed:
        """Return a job that has made half of its steps, each as fast as predicted. Its deadline is ``left_s`` away."""
        at_s = 0.85 * self.STEPS_S
        spec = job(minimize, at_s + left_s, steps=self.STEPS, globalBatchSize=1437, nodes={"min": 1, "max": 1})
        first = seen(spec)
        parsed = parse_observed(first)
        assert parsed.spec is not None
        first = replace(first, learned={(profile_key(parsed.spec), "cpu"): self.EACH})
        observed = settled(after(first, step(first)))
        observed = after(observed, step(observed, 5.0))
        return reports(observed, at_s, step=self.STEPS // 2, steps=self.STEPS, step_s=0.15)

    def test_their_part_of_the_training_is_predicted(self) -> None:
        predicted = plan_of(self.half_done(1.0)).status.predicted
        assert predicted.evaluation_seconds > 0.3 * predicted.total_seconds
        each_s = predicted.per_step_s(0.15, self.STEPS)
        assert predicted.total_seconds == pytest.approx(each_s * self.STEPS, rel=0.01)

    @pytest.mark.parametrize("minimize", ["Time", "Energy"])
    def test_a_job_without_time_for_them_is_late(self, minimize: str) -> None:
        """Fixed bug: the remaining steps alone counted, so that the job was on time until it was too late."""
        at_s, left_s = 0.85 * self.STEPS_S, self.STEPS_S / 2
        found = step(self.half_done(1.3 * left_s, minimize), at_s + 1)
        assert verdict(found, "DeadlineAtRisk") == ("True", "PredictedLate")
        assert verdict(step(self.half_done(2.0 * left_s, minimize), at_s + 1), "DeadlineAtRisk") == ("False", "OnTime")
        shown = status(found)
        assert shown.plan is not None and shown.forecast is not None and shown.eta is not None
        rest_s = shown.plan.predicted.per_step_s(0.15, self.STEPS) * self.STEPS / 2
        assert shown.forecast.remaining_seconds == pytest.approx(rest_s, rel=0.01)
        assert (shown.eta - NOW).total_seconds() == pytest.approx(rest_s, rel=0.01)


class TestCondition:
    def test_deadline_passes_and_ends(self) -> None:
        observed = trains(job(), 0.3 * ONE_S, step=STEPS * 3 // 10, step_s=0.15)
        assert verdict(step(observed, 2 * ONE_S), "DeadlineAtRisk") == ("True", "DeadlinePassed")
        done = replace(observed, report=report(observed, RunPhase.SUCCEEDED, step=STEPS, steps=STEPS))
        assert verdict(step(done, ONE_S), "DeadlineAtRisk") == ("False", "DeadlineMet")
        assert verdict(step(done, 2 * ONE_S), "DeadlineAtRisk") == ("True", "DeadlineMissed")

    def test_job_without_a_deadline_has_none(self) -> None:
        observed = trains(job(deadline_s=None), 1000.0, step=6000, step_s=0.15)
        assert "DeadlineAtRisk" not in {c.type for c in status(step(observed, 1000.0)).conditions}

    def test_removed_deadline(self) -> None:
        due = (NOW + timedelta(seconds=ONE_S)).isoformat()
        observed = trains(job("Time", None, scheduling={"finishBy": due}), 1000.0, step=6000, step_s=0.15)
        assert verdict(step(observed, 1000.0), "DeadlineAtRisk")[1] in ("OnTime", "PredictedLate")
        without = replace(observed, job=replace(observed.job, spec=job("Time", None)))
        assert verdict(step(without, 1000.0), "DeadlineAtRisk") == ("Unknown", "NoDeadline")

    def test_does_not_flutter(self) -> None:
        """A condition that changes with each report would cause an event each time."""
        at_s = 0.3 * ONE_S
        late = trains(job(deadline_s=1.05 * ONE_S), at_s, step=STEPS * 26 // 100, step_s=0.165)
        assert verdict(step(late, at_s), "DeadlineAtRisk") == ("True", "PredictedLate")
        left_s = (STEPS - STEPS * 26 // 100) * 0.15
        slack_s = 1.05 * ONE_S - at_s - left_s
        just = reports(late, at_s, step=STEPS * 26 // 100, step_s=0.15 * (1 + 0.9 * slack_s / left_s) / 1.1)
        assert verdict(step(just, at_s), "DeadlineAtRisk")[0] == "True"


class TestMissedDeadline:
    """A deadline that has passed no longer changes the plan: the job goes on with the least energy or cost."""

    @pytest.mark.parametrize("minimize", ["Energy", "Cost"])
    def test_job_moves_to_no_more_nodes(self, minimize: str) -> None:
        late = trains(job(minimize), 1.4 * ONE_S, step=STEPS // 3, step_s=0.225)
        before = step(looks(late), 1.4 * ONE_S)
        assert verdict(before, "Resizing") == ("True", "DeadlineAtRisk"), "it still ends sooner with more nodes"
        missed = step(looks(late), 1.6 * ONE_S)
        assert verdict(missed, "DeadlineAtRisk") == ("True", "DeadlinePassed")
        assert verdict(missed, "Resizing") == ("False", "NotWorthwhile"), condition_of(missed, "Resizing").message
        assert "deadline" not in condition_of(missed, "Resizing").message
        decided = step(looks(after(late, before)), 1.6 * ONE_S)
        assert verdict(decided, "Resizing") == ("False", "NotWorthwhile"), "a move that was decided, but did not begin"

    def test_job_moves_to_the_plan_with_the_least_energy(self) -> None:
        """It had three nodes for the deadline only."""
        observed = trains(job(deadline_s=0.8 * ONE_S), 0.7 * ONE_S, step=STEPS // 3, step_s=0.1)
        assert plan_of(observed).nodes > 1
        assert verdict(step(looks(observed), 0.7 * ONE_S), "Resizing") == ("False", "NotWorthwhile")
        decided = step(looks(observed), 0.9 * ONE_S)
        found = condition_of(decided, "Resizing")
        assert (found.status.value, found.reason) == ("True", "BetterPlan"), found.message
        assert "to 1 x cpu" in found.message
        leaving = step(after(observed, decided), 0.9 * ONE_S + 1)
        assert [scale.replicas for scale in leaving.scales] == [0]

    def test_a_later_deadline_still_counts(self) -> None:
        due = (NOW + timedelta(seconds=2 * ONE_S)).isoformat()
        spec = job(deadline_s=0.5 * ONE_S, scheduling={"finishBy": due})
        observed = trains(spec, 0.75 * ONE_S, step=STEPS // 10, step_s=0.1)
        decided = step(looks(observed), 0.75 * ONE_S)
        assert verdict(decided, "DeadlineAtRisk") == ("True", "DeadlinePassed")
        found = condition_of(decided, "Resizing")
        assert f"{duration(1.25 * ONE_S)} are left to the deadline" in found.message, found.message

    def test_new_plan_has_no_deadline(self) -> None:
        """Otherwise, the fastest plan would be chosen, with a warning about an impossible deadline."""
        observed = trains(job(), 1.6 * ONE_S, step=STEPS // 3, step_s=0.225)
        asked = with_pace(parse_observed(observed), NOW + timedelta(seconds=1.6 * ONE_S))
        found = make_plan.decide(replace(asked, observed=looks(observed)), CONFIG)
        assert isinstance(found, StoredPlan)
        assert found.nodes == 1 and found.warning is None

    def test_question_stays_the_same(self) -> None:
        observed = trains(job(), 1.6 * ONE_S, step=STEPS // 3, step_s=0.225)
        at = [with_pace(parse_observed(observed), NOW + timedelta(seconds=f * ONE_S)).pace_s for f in (1.6, 1.8)]
        assert at[0] == at[1] and not pace_changed(*at)
        on_time = with_pace(parse_observed(observed), NOW + timedelta(seconds=ONE_S)).pace_s
        assert pace_changed(on_time, at[0]) and pace_changed(at[0], on_time), "the user has set a later deadline"


class TestFirstPlan:
    def test_earlier_deadline_counts(self) -> None:
        """The job has not started, so that ``objective.deadline`` counts from now."""
        due = (NOW + timedelta(days=30)).isoformat()
        both = seen(job(deadline_s=0.8 * ONE_S, scheduling={"finishBy": due}))
        parsed = parse_observed(both)
        assert parsed.spec is not None
        both = replace(both, learned={(profile_key(parsed.spec), "cpu"): HALF_FIXED})
        assert plan_of(after(both, step(both))).nodes > 1


class TestTimeWithoutDevices:
    """``objective.deadline`` is a run time: the job does not use it up while it is suspended or waits for devices."""

    AT_S = 0.3 * ONE_S
    PAUSE_S = 0.6 * ONE_S

    def paused(self) -> Observed:
        observed = trains(job(), self.AT_S, step=STEPS * 3 // 10, step_s=0.15)
        stopping = changed(observed, suspend=True)
        stopped = replace(after(stopping, step(stopping, self.AT_S)), pods=())
        return after(stopped, step(stopped, self.AT_S + 30))

    def test_suspended_job_keeps_the_rest_of_its_deadline(self) -> None:
        stopped = self.paused()
        back = changed(stopped, suspend=False)
        resumed = after(back, step(back, self.AT_S + self.PAUSE_S))
        assert plan_of(resumed).nodes == 1, "the remaining steps meet the deadline on one node"
        assert DLJobStatus.model_validate(resumed.job.status).waited_seconds == pytest.approx(self.PAUSE_S, abs=1)
        trains_on = reports(settled(resumed), self.AT_S + self.PAUSE_S + 60, step=STEPS * 3 // 10 + 30, step_s=0.15)
        found = condition_of(step(trains_on, self.AT_S + self.PAUSE_S + 61), "DeadlineAtRisk")
        assert found.reason == "OnTime", found.message
        due = (NOW + timedelta(seconds=1.5 * ONE_S + self.PAUSE_S)).replace(microsecond=0)
        assert f"the deadline is {due.isoformat().replace('+00:00', 'Z')};" in found.message

    def test_deadline_does_not_pass_meanwhile(self) -> None:
        stopped = self.paused()
        later = step(stopped, 3 * ONE_S)
        assert verdict(later, "DeadlineAtRisk")[1] == "OnTime", "the verdict of the last training remains"
        assert not later.events and later.requeue_after_s is None
        paces = {with_pace(parse_observed(stopped), NOW + timedelta(seconds=f * ONE_S)).pace_s for f in (1, 2, 3)}
        assert len(paces) == 1, "the question does not change while it waits"

    def test_pauses_add_up(self) -> None:
        resumed = self.paused()
        for at_s in (ONE_S, 2 * ONE_S):
            on = changed(resumed, suspend=False)
            on = after(on, step(on, at_s))
            off = changed(on, suspend=True)
            resumed = after(off, step(off, at_s + 100))
        waited = DLJobStatus.model_validate(resumed.job.status).waited_seconds
        assert waited == pytest.approx((ONE_S - self.AT_S) + (ONE_S - 100), abs=2)

    def test_job_of_an_earlier_release_keeps_its_deadline(self) -> None:
        """Nobody knows how long it has waited: the deadline counts from its start as before."""
        observed = trains(job(), self.AT_S, step=STEPS * 3 // 10, step_s=0.15)
        assert "waitedSeconds" not in observed.job.status
        parsed = parse_observed(observed)
        assert parsed.spec is not None
        assert deadline_of(parsed.spec, parsed.before, NOW) == NOW + timedelta(seconds=1.5 * ONE_S)

    def test_finish_by_is_a_time(self) -> None:
        due = (NOW + timedelta(seconds=2 * ONE_S)).isoformat()
        observed = trains(job(deadline_s=None, scheduling={"finishBy": due}), 900.0, step=6000, step_s=0.15)
        off = changed(observed, suspend=True)
        off = replace(after(off, step(off, 1000.0)), pods=())
        late = step(off, 2.5 * ONE_S)
        assert verdict(late, "DeadlineAtRisk") == ("True", "DeadlinePassed")


class TestEndedJob:
    """An operator that is upgraded, or a user who edits an ended job, must not cause a warning about the past."""

    @pytest.mark.parametrize("how", [RunPhase.SUCCEEDED, RunPhase.FAILED])
    def test_job_that_ended_before_gets_no_condition_and_no_event(self, how: RunPhase) -> None:
        due = (NOW + timedelta(seconds=ONE_S)).isoformat()
        spec = job(scheduling={"finishBy": due})
        observed = trains(spec, 0.3 * ONE_S, step=STEPS * 3 // 10, step_s=0.15)
        observed = replace(observed, report=report(observed, how, step=STEPS, steps=STEPS))
        ended = step(observed, 2 * ONE_S)
        assert {"DeadlineMissed"} <= {event.reason for event in ended.events}
        kept = after(observed, ended)
        of_old = [c for c in kept.job.status["conditions"] if not c["type"].startswith("Deadline")]
        upgraded = replace(kept, job=replace(kept.job, status={**kept.job.status, "conditions": of_old}))
        found = step(upgraded, 3 * ONE_S)
        assert not found.events
        assert not [c.type for c in status(found).conditions if c.type.startswith("Deadline")]

    def test_verdict_of_an_ended_job_does_not_change(self) -> None:
        due = (NOW + timedelta(seconds=2 * ONE_S)).isoformat()
        observed = trains(job(scheduling={"finishBy": due}), 0.3 * ONE_S, step=STEPS * 3 // 10, step_s=0.15)
        done = replace(observed, report=report(observed, RunPhase.SUCCEEDED, step=STEPS, steps=STEPS))
        ended = step(done, ONE_S)
        assert verdict(ended, "DeadlineAtRisk") == ("False", "DeadlineMet")
        edited = changed(after(done, ended), scheduling={"finishBy": NOW.isoformat()})
        found = step(edited, 3 * ONE_S)
        assert not [event for event in found.events if event.reason.startswith("Deadline")]
        assert verdict(found, "DeadlineAtRisk") == ("False", "DeadlineMet")
        assert verdict(found, "DeadlineFeasible") == ("True", "DeadlineMet")
