"""Tests that later plans of a job do not have the numbers of ranks on which its script has failed."""

from dataclasses import replace

import pytest

from dlcontract import RunPhase
from dljob.cluster import ClusterView
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile.parsed import parse_observed
from support.builders import CPUS, DIGITS, Json, after, changed, plan_of, report, seen, settled
from support.job_lifecycle import step, verdict

SPEC: Json = {**{k: v for k, v in DIGITS.items() if k != "epochs"}, "steps": 100_000, "nodes": {"min": 1, "max": 3}}
TRAINING: Json = {"step": 500, "steps": 100_000, "step_s": 0.16}
REFUSED = [{"ranks": 2, "message": "ValueError: 2 ranks"}]
TWO = ClusterView(CPUS.nodes[:2])


@pytest.fixture
def trains_on_one() -> Observed:
    """A job of three nodes that lost one, whose script failed on two ranks, and that trains on one node now."""
    first = seen(SPEC)
    spec = parse_observed(first).spec
    assert spec is not None
    points = (LearnedPoint(32, 0.1, 50), LearnedPoint(48, 0.15, 50), LearnedPoint(96, 0.3, 50))
    fast = Learned(points, link_latency_s=1e-5, link_bandwidth_Bps=1e9)
    first = replace(first, learned={(profile_key(spec), "cpu"): fast})
    observed = settled(after(first, step(first)))
    observed = after(observed, step(observed, 5))
    observed = replace(observed, report=report(observed, **TRAINING))
    observed = after(observed, step(observed, 10))
    pod = replace(observed.pods[-1], ready=False, node=None, unschedulable="0/2 nodes are available")
    observed = replace(observed, pods=(*observed.pods[:-1], pod), view=TWO)
    lost = report(observed, RunPhase.RESTARTING, **TRAINING, refused_sizes=REFUSED)
    observed = replace(observed, report=lost)
    for seconds in (20, 320):
        observed = after(observed, step(observed, seconds))
    stopped = report(observed, RunPhase.STOPPED, **TRAINING, refused_sizes=REFUSED)
    observed = replace(observed, pods=(), report=stopped)
    observed = settled(after(observed, step(observed, 325)))
    assert plan_of(observed).nodes == 1
    observed = replace(observed, report=report(observed, **{**TRAINING, "step_s": 0.31}))
    return after(observed, step(observed, 400))


@pytest.mark.parametrize(("view", "moves"), [(TWO, False), (CPUS, True)], ids=["2 nodes", "3 nodes"])
def test_job_does_not_grow_to_ranks_that_its_script_refused_under_an_earlier_plan(
    trains_on_one: Observed, view: ClusterView, moves: bool
) -> None:
    """Regression: the report of the new plan lacks them, so the job moved to them, and its failures counted."""
    grown = replace(trains_on_one, view=view, capacity_grew=True)
    assert (verdict(step(grown, 4000), "Resizing") == ("True", "BetterPlan")) == moves


def test_agents_of_a_job_that_moves_know_them(trains_on_one: Observed) -> None:
    """Fixed bug: when the job lost pods, they tried each of them again."""
    assert plan_of(trains_on_one).plan.refused_ranks == (), "the plan has fewer ranks"
    grown = replace(trains_on_one, view=CPUS, capacity_grew=True)
    going = after(grown, step(grown, 4000))
    going = after(going, step(going, 4001))
    stopped = replace(going, pods=(), report=report(going, RunPhase.STOPPED, **TRAINING))
    there = plan_of(after(stopped, step(stopped, 4005)))
    assert (there.nodes, there.plan.refused_ranks) == (3, (2,))


def test_changed_script_may_use_them(trains_on_one: Observed) -> None:
    edited = replace(changed(trains_on_one, nodes={"min": 2, "max": 2}), view=TWO)
    assert verdict(step(edited, 4000), "Planned") == ("True", "Planned")
