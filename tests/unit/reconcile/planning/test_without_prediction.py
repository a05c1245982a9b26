"""Tests of jobs without a prediction: they run, and everything that needs a run time treats it as unknown."""

from dataclasses import replace
from datetime import timedelta

from dlcontract import RunPhase
from dljob.job.remaining import remaining_p90_s
from support.builders import NOW, Json, after, report, seen
from support.job_lifecycle import condition_of, started, status, step, verdict

SPEC: Json = {
    "trainer": {"command": ["torchrun", "train.py"], "framework": "Torchrun"},
    "nodes": {"min": 2},
    "resources": {"memory": "1Gi"},
    "scheduling": {"finishBy": (NOW + timedelta(days=1)).isoformat()},
}


def test_plan_says_what_is_missing() -> None:
    desired = step(seen(SPEC))
    plan = status(desired).plan
    assert plan is not None and (plan.nodes, plan.ranks, plan.predicted.step_seconds) == (2, 2, 0.0)
    assert plan.missing_fields is not None and "spec.model, spec.dataset" in plan.missing_fields[0]
    assert (
        "no predicted time; unset fields, and what they would enable: spec.model"
        in condition_of(desired, "Planned").message
    )
    assert verdict(desired, "DeadlineFeasible") == ("Unknown", "NoForecast")


def test_job_runs_and_completes_without_a_forecast() -> None:
    observed = started(SPEC)
    assert remaining_p90_s(status(step(observed))) is None
    observed = replace(observed, report=report(observed, RunPhase.RUNNING, step=0, steps=0, step_s=None))
    running = step(observed, 60.0)
    shown = status(running)
    assert (shown.progress, shown.eta, shown.forecast, shown.measured) == (None, None, None, None)
    assert verdict(running, "DeadlineFeasible") == ("Unknown", "NoForecast")
    again = step(after(observed, running), 7200.0)
    assert not again.objects or status(again).plan == shown.plan, "nothing contradicts such a plan"


def test_added_fields_lead_to_a_prediction() -> None:
    whole = {
        **SPEC, "model": {"hints": {"parameters": 1000, "flopsPerSample": 6000}}, "epochs": 1,
        "dataset": {"uri": "file:///data", "samples": 100}, "globalBatchSize": 10,
    }  # fmt: skip
    plan = status(step(seen(whole))).plan
    assert plan is not None and plan.missing_fields is None and plan.predicted.step_seconds > 0
    assert verdict(step(seen(whole)), "DeadlineFeasible")[1] != "DeadlinePassed"
