"""Tests of jobs that train on spot nodes: the interruptions to expect count for deadlines and for what remains."""

from dataclasses import replace
from datetime import timedelta

import pytest

from dljob.job.defaults import parse_defaults
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import Desired, reconcile
from dljob.reconcile.parsed import parse_observed
from dljob.render import RenderConfig
from support.builders import CONFIG, DIGITS, NOW, Json, after, nodes, report, seen, settled
from support.job_lifecycle import status, verdict

SPOT = replace(CONFIG, job_defaults=parse_defaults({"spot": {"priceFactor": 0.3, "interruptionsPerHour": 6}}))
VIEW = nodes({"count": 1, "cpu": 2, "memory": "4Gi", "labels": {"karpenter.sh/capacity-type": "spot"}})
MEASURED = Learned((LearnedPoint(96, 0.15, 50),))
STEPS = 200_000
CALM_S = 0.15 * STEPS
"""Predicted seconds of the training without interruptions."""


def at(observed: Observed, seconds: float, config: RenderConfig) -> Desired:
    return reconcile(observed, config, NOW + timedelta(seconds=seconds))


def half_done(at_s: float, finish_by_s: float, config: RenderConfig) -> Desired:
    """Reconcile a job that has made half of its steps until ``at_s``, each as fast as predicted."""
    spec: Json = {key: value for key, value in DIGITS.items() if key != "epochs"}
    finish_by = (NOW + timedelta(seconds=finish_by_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    spec |= {"steps": STEPS, "nodes": {"min": 1, "max": 1}, "scheduling": {"finishBy": finish_by}}
    first = seen(spec, VIEW)
    parsed = parse_observed(first)
    assert parsed.spec is not None
    first = replace(first, learned={(profile_key(parsed.spec), "cpu"): MEASURED})
    observed = settled(after(first, at(first, 0.0, config)))
    observed = after(observed, at(observed, 5.0, config))
    found = report(observed, step=STEPS // 2, steps=STEPS, step_s=0.15,
                   last_checkpoint={"step": STEPS // 2, "unix_s": NOW.timestamp()})  # fmt: skip
    observed = replace(observed, report=found)
    return at(after(observed, at(observed, at_s, config)), at_s + 1.0, config)


@pytest.mark.parametrize("often", [False, True])
def test_interruptions_that_are_predicted_count_while_the_job_trains(often: bool) -> None:
    """Fixed bug: only the plan of a new job counted them, so that a job was on time until it was too late."""
    config = SPOT if often else CONFIG
    found = status(at_end := half_done(0.65 * CALM_S, 1.3 * CALM_S, config))
    assert found.plan is not None and found.forecast is not None
    predicted = found.plan.predicted
    assert (predicted.interruption_seconds > 0.2 * CALM_S) is often
    each_s = predicted.per_step_s(0.15, STEPS)
    assert STEPS * each_s == pytest.approx(predicted.total_seconds, rel=0.01) and (each_s > 1.3 * 0.15) is often
    left_s = each_s * STEPS / 2
    assert found.forecast.remaining_seconds == pytest.approx(left_s, rel=0.01) and found.eta is not None
    assert (found.eta - NOW).total_seconds() == pytest.approx(left_s, rel=0.01)
    assert verdict(at_end, "DeadlineAtRisk") == (("True", "PredictedLate") if often else ("False", "OnTime"))
    assert verdict(at_end, "DeadlineFeasible") == (("False", "TooLate") if often else ("True", "InTime"))
