"""Strategy Auto over a job's life: from parts of the model to whole ones, the other way, and what either teaches."""

from dataclasses import replace
from typing import Any

from dlcontract import RunPhase
from dljob.cluster import ClusterView
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning import PARTS_WERE_SLOW
from support.builders import CPUS, Json, after, changed, nodes, plan_of, report, settled
from support.job_lifecycle import DOWN, started, status, step, told, verdict

SLOW_NETWORK = nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi", "bandwidth": "12.5M"})
OPEN: Json = {
    "model": {"name": "resnet50"},
    "dataset": {"name": "synthetic-images"},
    "globalBatchSize": 64,
    "steps": 100_000,
    "parallelism": {"strategy": "Auto"},
}
TIGHT: Json = {**OPEN, "model": {"name": "resnet18"}, "globalBatchSize": 256, "resources": {"memory": "1Gi"}}
WARM_S = 3000.0
"""Long enough for the steps that a plan is not judged by."""


def running(spec: Json, view: ClusterView, **news: Any) -> Observed:
    observed = started(spec, view=view)
    fields: Json = {"step": 500, "steps": 100_000, **news}
    observed = replace(observed, report=report(observed, **fields))
    return after(observed, step(observed))


def contradicted(spec: Json, view: ClusterView, step_s: float) -> Observed:
    observed = running(spec, view, step_s=step_s)
    assert plan_of(observed).plan.expected.step_p90_s < step_s
    slow = step(observed, WARM_S)
    assert verdict(slow, "PlanContradicted") == ("True", "SlowerThanPredicted")
    return after(observed, slow)


def moved(observed: Observed) -> Observed:
    """A better plan is in force, and its pods are ready."""
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "Replanning")
    moving = after(observed, judged)
    leaving = step(moving, WARM_S + 11)
    assert leaving.scales == DOWN, "checkpoint, and leave"
    gone = after(moving, leaving)
    gone = replace(gone, pods=(), report=report(gone, RunPhase.STOPPED, step=510, steps=100_000))
    new = step(gone, WARM_S + 30)
    assert verdict(new, "PlanContradicted") == ("False", "Replanned")
    return settled(after(gone, new))


def test_parts_that_are_too_slow_give_way_to_whole_models_for_good() -> None:
    observed = contradicted(OPEN, SLOW_NETWORK, 30.0)
    assert plan_of(observed).plan.parallelism == "Pipeline"
    now = moved(observed)
    found = plan_of(now)
    assert (found.plan.parallelism, found.replans, found.splitting_disabled) == ("Data", 1, True)
    assert not needs_view(now)
    # Whole models were slower still: no plan goes back to what this job has seen fail.
    news = report(now, step=1000, steps=100_000, step_s=300.0)
    again = after(now, step(replace(now, report=news), 2 * WARM_S))
    again = replace(again, report=news)
    again = after(again, step(again, 3 * WARM_S + 3000))
    assert verdict(step(again, 3 * WARM_S + 3010), "PlanContradicted") == ("True", "NoBetterPlan")


def test_parts_that_are_slow_but_not_as_slow_as_whole_models_stay() -> None:
    observed = contradicted(OPEN, SLOW_NETWORK, 12.0)
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    assert "2 x cpu, Ring, 32+32, including the restart" in told(judged, "PlanContradicted").message


def test_parts_of_what_fits_in_no_other_way_stay() -> None:
    observed = contradicted(TIGHT, CPUS, 60.0)
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    message = told(judged, "PlanContradicted").message
    assert "no plan is possible now without model parallelism: " in message


def test_another_spec_may_have_parts_again() -> None:
    now = moved(contradicted(OPEN, SLOW_NETWORK, 30.0))
    edited = changed(now, steps=90_000)
    leaving = after(edited, step(edited, 2 * WARM_S))
    gone = replace(leaving, pods=(), report=report(leaving, RunPhase.STOPPED, step=520, steps=100_000))
    new = settled(after(gone, step(gone, 2 * WARM_S + 20)))
    assert (plan_of(new).plan.parallelism, plan_of(new).splitting_disabled) == ("Pipeline", False)


def learned(observed: Observed) -> Observed:
    """Profiles of the device, and of a network that carries a hundredth of what was assumed."""
    spec = parse_observed(observed).spec
    assert spec is not None
    points = tuple(LearnedPoint(b, 0.02 + 0.09 * b, 50) for b in (1, 8, 32))
    network = Learned(points, link_latency_s=1e-3, link_bandwidth_Bps=1.25e7)
    return replace(observed, learned={(profile_key(spec), "cpu"): network})


def test_whole_models_give_way_to_parts_that_pay_for_the_restart() -> None:
    observed = contradicted(OPEN, CPUS, 30.0)
    assert plan_of(observed).plan.parallelism == "Data"
    found = plan_of(moved(learned(observed)))
    assert (found.plan.parallelism, found.replans, found.splitting_disabled) == ("Pipeline", 1, False)
    assert found.plan.micro_batches > 1 and found.plan.min_ranks == len(found.plan.ranks)


def test_parts_do_not_pay_for_a_restart_near_the_end() -> None:
    observed = running(OPEN, CPUS, step=99_999, step_s=7.0)
    observed = learned(after(observed, step(observed, WARM_S)))
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    message = told(judged, "PlanContradicted").message
    assert "Pipeline of " in message and "including the restart" in message


def test_without_checkpoints_a_restart_costs_all_that_was_done() -> None:
    for checkpoint, expected in (({"enabled": True}, "Replanning"), ({"enabled": False}, "NoBetterPlan")):
        observed = running({**OPEN, "checkpoint": checkpoint}, CPUS, step=90_000, step_s=30.0)
        observed = learned(after(observed, step(observed, WARM_S)))
        assert verdict(step(observed, WARM_S + 10), "PlanContradicted") == ("True", expected)


def test_only_whole_models_teach_profiles() -> None:
    for spec, view, teaches in ((OPEN, SLOW_NETWORK, False), (OPEN, CPUS, True)):
        observed = running(spec, view, step_s=1.0)
        ended = step(replace(observed, report=report(observed, RunPhase.SUCCEEDED, step_s=1.0)))
        assert (ended.measurements is not None) == teaches, plan_of(observed).status.summary


def test_why_parts_are_left_out_is_shown() -> None:
    now = moved(contradicted(OPEN, SLOW_NETWORK, 30.0))
    shown = status(step(now, 2 * WARM_S)).plan
    assert shown is not None
    assert [r.reason for r in shown.rejected if r.summary == "Pipeline"] == [f"not considered: {PARTS_WERE_SLOW}"]
