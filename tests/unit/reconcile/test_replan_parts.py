"""Strategy Auto over a job's life: changes between model and data parallelism, and updates of profiles."""

from dataclasses import replace
from typing import Any

from dlcontract import RunPhase
from dljob.cluster import ClusterView
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning import MODEL_PARALLELISM_WAS_SLOW
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
"""Longer than the first steps, which do not count."""


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


def test_data_parallelism_replaces_slow_model_parallelism_for_good() -> None:
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


def test_slow_model_parallelism_stays_if_data_parallelism_is_slower() -> None:
    observed = contradicted(OPEN, SLOW_NETWORK, 12.0)
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    assert "2 x cpu, Ring, 32+32, including the restart" in told(judged, "PlanContradicted").message


def test_model_parallelism_stays_if_nothing_else_fits() -> None:
    observed = contradicted(TIGHT, CPUS, 60.0)
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    message = told(judged, "PlanContradicted").message
    assert "no plan is possible now without model parallelism: " in message


def test_another_spec_may_use_model_parallelism_again() -> None:
    now = moved(contradicted(OPEN, SLOW_NETWORK, 30.0))
    edited = changed(now, steps=90_000)
    leaving = after(edited, step(edited, 2 * WARM_S))
    gone = replace(leaving, pods=(), report=report(leaving, RunPhase.STOPPED, step=520, steps=100_000))
    new = settled(after(gone, step(gone, 2 * WARM_S + 20)))
    assert (plan_of(new).plan.parallelism, plan_of(new).splitting_disabled) == ("Pipeline", False)


def learned(observed: Observed) -> Observed:
    """Return profiles of the device, and of a network with a hundredth of the assumed bandwidth."""
    spec = parse_observed(observed).spec
    assert spec is not None
    points = tuple(LearnedPoint(b, 0.02 + 0.09 * b, 50) for b in (1, 8, 32))
    network = Learned(points, link_latency_s=1e-3, link_bandwidth_Bps=1.25e7)
    return replace(observed, learned={(profile_key(spec), "cpu"): network})


def test_model_parallelism_replaces_data_parallelism_if_it_pays_for_the_restart() -> None:
    observed = contradicted(OPEN, CPUS, 30.0)
    assert plan_of(observed).plan.parallelism == "Data"
    found = plan_of(moved(learned(observed)))
    assert (found.plan.parallelism, found.replans, found.splitting_disabled) == ("Pipeline", 1, False)
    assert found.plan.micro_batches > 1 and found.plan.min_ranks == len(found.plan.ranks)


def test_no_restart_for_model_parallelism_near_the_end() -> None:
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


def test_runs_with_model_parallelism_do_not_update_profiles() -> None:
    for spec, view, teaches in ((OPEN, SLOW_NETWORK, False), (OPEN, CPUS, True)):
        observed = running(spec, view, step_s=1.0)
        ended = step(replace(observed, report=report(observed, RunPhase.SUCCEEDED, step_s=1.0)))
        assert (ended.measurements is not None) == teaches, plan_of(observed).status.summary


def test_the_reason_against_model_parallelism_is_shown() -> None:
    now = moved(contradicted(OPEN, SLOW_NETWORK, 30.0))
    shown = status(step(now, 2 * WARM_S)).plan
    assert shown is not None
    assert [r.reason for r in shown.rejected if r.summary == "Pipeline"] == [
        f"not considered: {MODEL_PARALLELISM_WAS_SLOW}"
    ]
