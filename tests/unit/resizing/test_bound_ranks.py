"""Tests of jobs that keep their number of ranks, because each rank reads its own part of a data stream."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlcontract import Failure, RunPhase
from dljob.cluster import ClusterView
from dljob.faults import LeftOut
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import question
from support.builders import CPUS, DIGITS, NOW, Json, after, changed, plan_of, report, seen, settled
from support.job_lifecycle import condition_of, status, step, verdict

SPEC: Json = {**{k: v for k, v in DIGITS.items() if k != "epochs"}, "steps": 100_000, "nodes": {"min": 1, "max": 3}}
TRAINING: Json = {"step": 500, "steps": 100_000, "step_s": 0.16, "epoch": 3}
TWO = ClusterView(CPUS.nodes[:2])
SCALES = Learned(
    (LearnedPoint(32, 0.1, 50), LearnedPoint(48, 0.15, 50), LearnedPoint(96, 0.3, 50)),
    link_latency_s=1e-5, link_bandwidth_Bps=1e9,
)  # fmt: skip
STREAM = "a data stream"


def trains(view: ClusterView, *, bound: bool, spec: Json = SPEC, **changes: Any) -> Observed:
    """Return a job that trains on all nodes of ``view``. ``bound``: True if its ranks read a data stream."""
    first = seen(spec, view)
    parsed = parse_observed(first).spec
    assert parsed is not None
    first = replace(first, learned={(profile_key(parsed), "cpu"): SCALES})
    observed = settled(after(first, step(first)))
    assert plan_of(observed).nodes == len(view.nodes)
    observed = after(observed, step(observed, 5))
    fields = {**TRAINING, "last_checkpoint": {"step": 490, "unix_s": NOW.timestamp()}, **changes}
    observed = replace(observed, report=report(observed, **fields, bound_ranks=len(view.nodes) if bound else None))
    return after(observed, step(observed, 10))


def reported(observed: Observed, phase: RunPhase, bound: int | None = 3, **changes: Any) -> Observed:
    return replace(observed, report=report(observed, phase, **TRAINING, bound_ranks=bound, **changes))


def without_node(observed: Observed) -> Observed:
    """Return the job after the node of its last pod was removed: the new pod finds no node, and no rank trains."""
    pod = replace(observed.pods[-1], ready=False, node=None, unschedulable="0/2 nodes are available")
    return reported(replace(observed, pods=(*observed.pods[:-1], pod), view=TWO), RunPhase.RESTARTING)


def test_status_has_the_number() -> None:
    shown = status(step(trains(TWO, bound=True), 20)).progress
    assert shown is not None and shown.bound_ranks == 2
    free = status(step(trains(TWO, bound=False), 20)).progress
    assert free is not None and free.bound_ranks is None


@pytest.mark.parametrize("bound", [True, False])
def test_job_does_not_grow(bound: bool) -> None:
    """Fixed bug: it moved in the middle of an epoch, and failed with BadInput."""
    decided = step(replace(trains(TWO, bound=bound), view=CPUS, capacity_grew=True), 20)
    assert verdict(decided, "Resizing") == (("False", "NotWorthwhile") if bound else ("True", "BetterPlan"))
    text = condition_of(decided, "Resizing").message
    assert (STREAM in text and "2 ranks" in text) == bound


def test_job_moves_to_better_devices_with_as_many_ranks() -> None:
    observed = trains(TWO, bound=True)
    quick = tuple(replace(node, name=f"quick-{node.name}", device="quick") for node in CPUS.nodes)
    parsed = parse_observed(observed).spec
    assert parsed is not None
    points = tuple(LearnedPoint(each.batch, each.compute_s / 4, 50) for each in SCALES.points)
    learned = {**observed.learned, (profile_key(parsed), "quick"): replace(SCALES, points=points)}
    both = ClusterView((*TWO.nodes, *quick))
    decided = step(replace(observed, view=both, learned=learned, capacity_grew=True), 20)
    assert verdict(decided, "Resizing") == ("True", "BetterPlan")
    assert "to 2 x quick" in condition_of(decided, "Resizing").message


def test_contradicted_plan_is_replaced_by_one_with_as_many_ranks() -> None:
    observed = replace(trains(TWO, bound=True, step_s=5.0), view=CPUS)
    observed = after(observed, step(observed, 700))
    assert verdict(step(observed, 700), "PlanContradicted") == ("True", "SlowerThanPredicted")
    found = step(observed, 720)
    assert verdict(found, "PlanContradicted") == ("True", "NoBetterPlan")
    assert STREAM in condition_of(found, "PlanContradicted").message


def test_job_waits_for_a_lost_pod() -> None:
    """Fixed bug: it was planned for the nodes that were left, and failed with BadInput."""
    observed = without_node(trains(CPUS, bound=True))
    observed = after(observed, step(observed, 20))
    released = step(observed, 320)
    assert verdict(released, "Resizing") == ("False", "NotWorthwhile")
    assert verdict(released, "Admitted") == ("False", "StartTimedOut")
    down = replace(after(observed, released), pods=())
    waits = step(down, 400)
    assert verdict(waits, "Planned")[0] == "False" and verdict(waits, "Admitted") == ("False", "NoPlan")
    assert STREAM in condition_of(waits, "Planned").message and waits.scales == ()
    assert needs_view(down, None, NOW + timedelta(seconds=400))
    starts = step(replace(after(down, waits), view=CPUS), 420)
    assert starts.plan is not None and starts.plan.nodes == 3
    assert STREAM in condition_of(starts, "Planned").message, "the plan says why it has this number"


def stopped_by_user(observed: Observed) -> Observed:
    suspended = changed(observed, suspend=True)
    stopped = replace(after(suspended, step(suspended, 20)), pods=())
    stopped = reported(stopped, RunPhase.STOPPED)
    return changed(after(stopped, step(stopped, 25)), suspend=False)


def fenced(observed: Observed) -> Observed:
    """Return the job after the operator has raised the term, so that the report of its last coordinator is ignored."""
    stopped = stopped_by_user(observed)
    found = plan_of(stopped)
    raised = found.model_copy(update={"plan": found.plan.model_copy(update={"term": found.plan.term + 1})})
    ignored = replace(stopped, plan=raised.data())
    assert parse_observed(ignored).report is None
    return ignored


@pytest.mark.parametrize("stop", [stopped_by_user, fenced])
def test_stopped_job_starts_with_as_many_ranks(stop: Callable[[Observed], Observed]) -> None:
    """Fixed bug: after a stop, it started on the devices that were free, and failed with BadInput."""
    stopped = replace(stop(trains(CPUS, bound=True)), view=TWO)
    waits = step(stopped, 30)
    assert verdict(waits, "Planned")[0] == "False" and STREAM in condition_of(waits, "Planned").message
    assert plan_of(after(stopped, step(replace(stopped, view=CPUS), 30))).nodes == 3
    free = replace(stop(trains(CPUS, bound=False)), view=TWO, report=None)
    cleared = replace(free, job=replace(free.job, status={**free.job.status, "progress": {"step": 500}}))
    assert plan_of(after(cleared, step(cleared, 30))).nodes == 2


def test_job_without_checkpoints_starts_anew_with_any_number() -> None:
    spec = {**SPEC, "checkpoint": {"enabled": False}}
    stopped = replace(stopped_by_user(trains(CPUS, bound=True, spec=spec)), view=TWO)
    assert plan_of(after(stopped, step(stopped, 30))).nodes == 2


def test_changed_spec_waits_for_the_number() -> None:
    """The job trains on, as with a change that contradicts its checkpoint."""
    fewer = changed(trains(CPUS, bound=True), nodes={"min": 1, "max": 2})
    kept = step(fewer, 20)
    assert verdict(kept, "Planned") == ("False", "TooFewNodes") and kept.scales == ()
    assert STREAM in condition_of(kept, "Planned").message
    assert "the job continues with plan 1" in condition_of(kept, "Planned").message
    free = reported(after(fewer, kept), RunPhase.RUNNING, bound=None)
    assert verdict(step(free, 60), "Running") == ("False", "Replacing")


def test_faulty_node_is_left_only_for_as_many_nodes() -> None:
    observed = trains(CPUS, bound=True)
    placed = zip(observed.pods, CPUS.nodes, strict=True)
    observed = replace(observed, pods=tuple(replace(pod, node=node.name) for pod, node in placed))
    pod = observed.pods[0]
    failure = Failure(reason="DeviceFailed", message="the device failed", host=pod.name).model_dump()
    faulty = reported(observed, RunPhase.RESTARTING, failure=failure, restarts={"DeviceFailed": 1})
    assert pod.node is not None
    left_out = {pod.node: LeftOut(node=pod.node, since=NOW, until=NOW + timedelta(days=1))}
    decided = step(replace(faulty, left_out=left_out), 20)
    assert verdict(decided, "NodeFaulty") == ("True", "NoOtherNodes") and decided.scales == ()
    assert STREAM in condition_of(decided, "NodeFaulty").message


def test_job_is_planned_again_when_the_number_is_free() -> None:
    """An answer of the planner is used again for an equal question."""
    bound = trains(TWO, bound=True)
    free = reported(bound, RunPhase.RUNNING, bound=None)
    assert question(parse_observed(bound)) != question(parse_observed(free))
