"""Tests of running jobs with a deadline that minimize energy or cost: they move when they are late or early."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlcontract import RunPhase
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import question
from dljob.reconcile.planning.rest import with_pace
from support.builders import DIGITS, NOW, Json, after, plan_of, report, seen, settled
from support.job_lifecycle import condition_of, status, step, verdict

HALF_FIXED = Learned(
    (LearnedPoint(32, 0.2, 50), LearnedPoint(48, 0.225, 50), LearnedPoint(96, 0.3, 50)),
    link_latency_s=1e-5, link_bandwidth_Bps=1e9,
)  # fmt: skip
"""One node needs 0.3 s for a step, and three need 0.2 s and therefore twice the energy."""
STEPS = 100_000
VOLUME: Json = {"checkpoint": {"volume": {"storageClassName": "shared", "shared": True}}}
ONE_S = 0.3 * STEPS
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
    observed = trains(job(), 0.75 * ONE_S, step=STEPS // 3, step_s=0.45)
    assert plan_of(observed).nodes == 1
    assert verdict(step(observed, 0.75 * ONE_S), "DeadlineAtRisk") == ("True", "PredictedLate")
    decided = step(looks(observed), 0.75 * ONE_S)
    assert verdict(decided, "Resizing") == ("True", "DeadlineAtRisk"), condition_of(decided, "Resizing").message
    assert "s are left to the deadline" in condition_of(decided, "Resizing").message
    going = replace(after(observed, decided), capacity_grew=False)
    leaving = step(going, 0.75 * ONE_S + 1)
    assert [scale.replicas for scale in leaving.scales] == [0]
    stopped = replace(after(going, leaving), pods=())
    stopped = replace(stopped, report=report(stopped, RunPhase.STOPPED, step=STEPS // 3, steps=STEPS))
    there = after(stopped, step(stopped, 0.75 * ONE_S + 30))
    assert plan_of(there).nodes > 1
    there = reports(settled(there), 0.75 * ONE_S + 60, step=STEPS // 3 + 30, step_s=0.2)
    assert verdict(step(there, 0.75 * ONE_S + 61), "DeadlineAtRisk") == ("False", "OnTime")


def test_early_job_moves_to_fewer_nodes_with_less_energy() -> None:
    """The deadline needed three nodes for the whole training. Of the steps that are left, one node is fast enough."""
    spec = job(deadline_s=0.8 * ONE_S)
    observed = trains(spec, 0.1 * ONE_S, step=STEPS * 6 // 10, step_s=0.2)
    assert plan_of(observed).nodes > 1
    decided = step(looks(observed), 0.1 * ONE_S)
    found = condition_of(decided, "Resizing")
    assert (found.status.value, found.reason) == ("True", "BetterPlan"), found.message
    assert "to 1 x cpu" in found.message and " J with the other, " in found.message
    fast = reports(observed, 0.1 * ONE_S, step=STEPS * 6 // 10, step_s=0.05)
    assert verdict(step(looks(fast), 0.1 * ONE_S), "Resizing") == ("False", "NotWorthwhile"), "it uses less as it is"


@pytest.mark.parametrize("minimize", ["Energy", "Cost"])
def test_job_on_schedule_stays(minimize: str) -> None:
    observed = trains(job(minimize), 0.3 * ONE_S, step=STEPS * 3 // 10, step_s=0.3)
    assert not needs_view(observed)
    stays = step(looks(observed), 0.3 * ONE_S)
    assert verdict(stays, "Resizing") == ("False", "NotWorthwhile") and stays.scales == ()
    assert verdict(stays, "DeadlineAtRisk") == ("False", "OnTime")
    forecast = status(stays).forecast
    assert forecast is not None and forecast.deadline_slack_seconds is not None
    assert 0 < forecast.deadline_slack_seconds < 1.2 * ONE_S


def test_contradicted_plan_for_energy_is_planned_again() -> None:
    observed = trains(job(deadline_s=None), 1000.0, step=2000, step_s=2.0)
    assert verdict(step(observed, 1100.0), "PlanContradicted") == ("True", "SlowerThanPredicted")


def test_question_does_not_change_while_the_job_is_on_schedule() -> None:
    """Otherwise, the planner would be asked anew in each reconcile, and its answer would never fit."""
    observed = trains(job(), 0.3 * ONE_S, step=STEPS * 3 // 10, step_s=0.3)
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


class TestCondition:
    def test_deadline_passes_and_ends(self) -> None:
        observed = trains(job(), 0.3 * ONE_S, step=STEPS * 3 // 10, step_s=0.3)
        assert verdict(step(observed, 2 * ONE_S), "DeadlineAtRisk") == ("True", "DeadlinePassed")
        done = replace(observed, report=report(observed, RunPhase.SUCCEEDED, step=STEPS, steps=STEPS))
        assert verdict(step(done, ONE_S), "DeadlineAtRisk") == ("False", "DeadlineMet")
        assert verdict(step(done, 2 * ONE_S), "DeadlineAtRisk") == ("True", "DeadlineMissed")

    def test_job_without_a_deadline_has_none(self) -> None:
        observed = trains(job(deadline_s=None), 1000.0, step=3000, step_s=0.3)
        assert "DeadlineAtRisk" not in {c.type for c in status(step(observed, 1000.0)).conditions}

    def test_removed_deadline(self) -> None:
        due = (NOW + timedelta(seconds=ONE_S)).isoformat()
        observed = trains(job("Time", None, scheduling={"finishBy": due}), 1000.0, step=3000, step_s=0.3)
        assert verdict(step(observed, 1000.0), "DeadlineAtRisk")[1] in ("OnTime", "PredictedLate")
        without = replace(observed, job=replace(observed.job, spec=job("Time", None)))
        assert verdict(step(without, 1000.0), "DeadlineAtRisk") == ("Unknown", "NoDeadline")

    def test_does_not_flutter(self) -> None:
        """A condition that changes with each report would cause an event each time."""
        at_s = 0.3 * ONE_S
        late = trains(job(deadline_s=1.05 * ONE_S), at_s, step=STEPS * 26 // 100, step_s=0.33)
        assert verdict(step(late, at_s), "DeadlineAtRisk") == ("True", "PredictedLate")
        left_s = (STEPS - STEPS * 26 // 100) * 0.3
        slack_s = 1.05 * ONE_S - at_s - left_s
        just = reports(late, at_s, step=STEPS * 26 // 100, step_s=0.3 * (1 + 0.9 * slack_s / left_s) / 1.1)
        assert verdict(step(just, at_s), "DeadlineAtRisk")[0] == "True"
