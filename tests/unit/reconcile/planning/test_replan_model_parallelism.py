"""Tests of strategy Auto over a job's life: changes between model and data parallelism, and profile updates."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from dlcontract import Failure, RunPhase, reasons
from dljob.cluster import ClusterView
from dljob.faults import LeftOut
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import MODEL_PARALLELISM_WAS_SLOW
from support.builders import CPUS, NOW, Json, after, changed, nodes, plan_of, report, settled
from support.job_lifecycle import DOWN, condition_of, started, status, step, verdict

SLOW_NETWORK = nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi", "bandwidth": "12.5M"})
OPEN: Json = {
    "model": {"name": "resnet50"},
    "dataset": {"name": "synthetic-images"},
    "globalBatchSize": 64,
    "steps": 100_000,
    "parallelism": {"strategy": "Auto", "gradientAccumulation": "Never"},
}
TIGHT: Json = {**OPEN, "model": {"name": "resnet18"}, "globalBatchSize": 256, "resources": {"memory": "1Gi"}}
WARM_S = 3000.0
"""Longer than the first steps, which are not measured."""


def running(spec: Json, view: ClusterView, **changes: Any) -> Observed:
    observed = started(spec, view=view)
    fields: Json = {"step": 500, "steps": 100_000, **changes}
    observed = replace(observed, report=report(observed, **fields))
    return after(observed, step(observed))


def contradicted(spec: Json, view: ClusterView, step_s: float) -> Observed:
    observed = running(spec, view, step_s=step_s)
    assert plan_of(observed).plan.expected.step_p90_s < step_s
    slow = step(observed, WARM_S)
    assert verdict(slow, "PlanContradicted") == ("True", "SlowerThanPredicted")
    return after(observed, slow)


def replanned(observed: Observed) -> Observed:
    """Return the state in which a better plan is used and its pods are ready."""
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "Replanning")
    moving = after(observed, judged)
    leaving = step(moving, WARM_S + 11)
    assert leaving.scales == DOWN, "pods save a checkpoint and stop"
    stopped = after(moving, leaving)
    stopped = replace(stopped, pods=(), report=report(stopped, RunPhase.STOPPED, step=510, steps=100_000))
    new = step(stopped, WARM_S + 30)
    assert verdict(new, "PlanContradicted") == ("False", "Replanned")
    return settled(after(stopped, new))


def test_faulty_node_does_not_speak_against_model_parallelism() -> None:
    observed = running(OPEN, SLOW_NETWORK)
    assert plan_of(observed).plan.parallelism == "Pipeline"
    node = observed.pods[0].node or ""
    failure = Failure(reason=reasons.DEVICE_FAILED, message="as it said", host=observed.pods[0].name)
    observed = replace(
        observed,
        report=report(observed, RunPhase.RESTARTING, failure=failure, failures=1, restarts={failure.reason: 1}),
        left_out={node: LeftOut(node=node, since=NOW, until=NOW + timedelta(days=1))},
    )
    leaving = step(observed, WARM_S)
    assert verdict(leaving, "NodeFaulty") == ("True", "Replanning")
    down = replace(after(observed, leaving), pods=(), report=None)
    found = plan_of(after(down, step(down, WARM_S + 10)))
    assert (found.plan.parallelism, found.replans, found.splitting_disabled) == ("Pipeline", 1, False)


def test_data_parallelism_replaces_slow_model_parallelism_for_good() -> None:
    observed = contradicted(OPEN, SLOW_NETWORK, 30.0)
    assert plan_of(observed).plan.parallelism == "Pipeline"
    now = replanned(observed)
    found = plan_of(now)
    assert (found.plan.parallelism, found.replans, found.splitting_disabled) == ("Data", 1, True)
    assert not needs_view(now)
    # Data parallelism was even slower, but a job never returns to a plan that was contradicted.
    latest = report(now, step=1000, steps=100_000, step_s=300.0)
    again = after(now, step(replace(now, report=latest), 2 * WARM_S))
    again = replace(again, report=latest)
    again = after(again, step(again, 3 * WARM_S + 3000))
    assert verdict(step(again, 3 * WARM_S + 3010), "PlanContradicted") == ("True", "NoBetterPlan")


def test_slow_model_parallelism_stays_if_data_parallelism_is_slower() -> None:
    observed = contradicted(OPEN, SLOW_NETWORK, 12.0)
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    assert "2 x cpu, Ring, 32+32, including the restart" in condition_of(judged, "PlanContradicted").message


def test_model_parallelism_stays_if_nothing_else_fits() -> None:
    observed = contradicted(TIGHT, CPUS, 60.0)
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    message = condition_of(judged, "PlanContradicted").message
    assert "no plan is possible now without model parallelism: " in message


def test_another_spec_may_use_model_parallelism_again() -> None:
    now = replanned(contradicted(OPEN, SLOW_NETWORK, 30.0))
    edited = changed(now, steps=90_000)
    leaving = after(edited, step(edited, 2 * WARM_S))
    stopped = replace(leaving, pods=(), report=report(leaving, RunPhase.STOPPED, step=520, steps=100_000))
    new = settled(after(stopped, step(stopped, 2 * WARM_S + 20)))
    assert (plan_of(new).plan.parallelism, plan_of(new).splitting_disabled) == ("Pipeline", False)


def with_slow_network(observed: Observed) -> Observed:
    """Return profiles of the device, and of a network with a hundredth of the assumed bandwidth."""
    spec = parse_observed(observed).spec
    assert spec is not None
    points = tuple(LearnedPoint(b, 0.02 + 0.09 * b, 50) for b in (1, 8, 32))
    network = Learned(points, link_latency_s=1e-3, link_bandwidth_Bps=1.25e7)
    return replace(observed, learned={(profile_key(spec), "cpu"): network})


def test_model_parallelism_replaces_data_parallelism_if_it_pays_for_the_restart() -> None:
    observed = contradicted(OPEN, CPUS, 30.0)
    assert plan_of(observed).plan.parallelism == "Data"
    found = plan_of(replanned(with_slow_network(observed)))
    assert (found.plan.parallelism, found.replans, found.splitting_disabled) == ("Pipeline", 1, False)
    assert found.plan.micro_batches > 1 and found.plan.min_ranks == len(found.plan.ranks)


def test_no_restart_for_model_parallelism_near_the_end() -> None:
    observed = running(OPEN, CPUS, step=99_999, step_s=7.0)
    observed = with_slow_network(after(observed, step(observed, WARM_S)))
    judged = step(observed, WARM_S + 10)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    message = condition_of(judged, "PlanContradicted").message
    assert "Pipeline of " in message and "including the restart" in message


def test_restart_without_checkpoints_costs_all_completed_steps() -> None:
    for checkpoint, expected in (({"enabled": True}, "Replanning"), ({"enabled": False}, "NoBetterPlan")):
        observed = running({**OPEN, "checkpoint": checkpoint}, CPUS, step=90_000, step_s=30.0)
        observed = with_slow_network(after(observed, step(observed, WARM_S)))
        assert verdict(step(observed, WARM_S + 10), "PlanContradicted") == ("True", expected)


def test_runs_with_model_parallelism_do_not_update_profiles() -> None:
    for spec, view, updates in ((OPEN, SLOW_NETWORK, False), (OPEN, CPUS, True)):
        observed = running(spec, view, step_s=1.0)
        ended = step(replace(observed, report=report(observed, RunPhase.SUCCEEDED, step_s=1.0)))
        assert (ended.measurements is not None) == updates, plan_of(observed).status.summary


def test_reason_against_model_parallelism_is_shown() -> None:
    now = replanned(contradicted(OPEN, SLOW_NETWORK, 30.0))
    shown = status(step(now, 2 * WARM_S)).plan
    assert shown is not None
    assert [r.reason for r in shown.rejected if r.summary == "Pipeline"] == [
        f"not considered: {MODEL_PARALLELISM_WAS_SLOW}"
    ]
