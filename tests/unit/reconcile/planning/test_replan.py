"""Tests of plans that measurements contradict: profile updates, and conditions of replanning."""

from dataclasses import replace
from typing import Any

import pytest

from dlcontract import Mismatch, RunPhase
from dljob.api import DLJobSpec
from dljob.job.identity import profile_key
from dljob.job.observed import ClaimSeen, Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from support.builders import CPUS, DIGITS, Json, after, changed, plan_of, report, seen, settled
from support.job_lifecycle import DOWN, condition_of, kinds, started, status, step, training, verdict

LONG: Json = {**DIGITS, "epochs": None, "steps": 100_000, "nodes": {"min": 1, "max": 3}}
WARM_S = 20.0
"""Long enough for MIN_STEPS steps of the predicted time."""
LONG = {key: value for key, value in LONG.items() if value is not None}
ONE_NODE_IS_BETTER = Learned(
    (LearnedPoint(32, 0.01, 50), LearnedPoint(96, 0.03, 50)), link_latency_s=0.05, link_bandwidth_Bps=1e6
)


def slow(spec: Json = LONG, claims: dict[str, ClaimSeen] | None = None, **changes: Any) -> Observed:
    """Return a job whose steps take far longer than the plan's p90. ``claims``: those of its user."""
    fields: Json = {"step": 500, "steps": 100_000, "step_s": 2.0, **changes}
    first = started(spec, claims=claims or {})
    first = replace(first, report=report(first, **fields))
    found = after(first, step(first))
    assert plan_of(found).nodes == 3, "the case needs a plan with three nodes"
    return after(found, step(found, WARM_S))


def parsed_spec(observed: Observed) -> DLJobSpec:
    spec = parse_observed(observed).spec
    assert spec is not None
    return spec


def with_updated_profile(observed: Observed) -> Observed:
    """Return the state with an updated profile, by which one node is better."""
    return replace(observed, learned={(profile_key(parsed_spec(observed)), "cpu"): ONE_NODE_IS_BETTER})


def test_step_time_within_the_interval_is_not_reported() -> None:
    observed = training(LONG, step=500, steps=100_000, step_s=1e-6)
    desired = step(observed, WARM_S)
    assert "PlanContradicted" not in {c.type for c in status(desired).conditions}
    assert desired.measurements is None and not needs_view(observed)


def test_profiles_are_updated_first_and_only_once() -> None:
    observed = training(LONG)
    noise = {"samples": 40.0, "steps": 500}
    observed = replace(observed, report=report(observed, step=500, steps=100_000, step_s=2.0, noise=noise))
    first = step(observed, WARM_S)
    assert first.measurements is not None and first.measurements.data is None, "a noise scale needs a whole training"
    assert verdict(first, "PlanContradicted") == ("True", "SlowerThanPredicted")
    assert "found a step time of 2s; expected 13.8ms (p90)" in condition_of(first, "PlanContradicted").message
    assert any(event.reason == "SlowerThanPredicted" and event.type == "Warning" for event in first.events)
    again = step(after(observed, first), WARM_S + 1)
    assert again.measurements is None and again.scales == ()


def test_better_plan_replaces_the_plan_after_all_pods_stopped() -> None:
    observed = with_updated_profile(slow())
    assert needs_view(observed)
    judged = step(observed, 30)
    assert verdict(judged, "PlanContradicted") == ("True", "Replanning")
    assert judged.scales == (), "the decision comes first, its execution in the next reconcile"
    moving = after(observed, judged)
    assert needs_view(moving)
    leaving = step(moving, 31)
    assert leaving.scales == DOWN
    assert verdict(leaving, "Running") == ("False", "Replacing")
    stopped = after(moving, leaving)
    stopped = replace(stopped, pods=(), report=report(stopped, RunPhase.STOPPED, step=510, steps=100_000))
    new = step(stopped, 60)
    assert verdict(new, "PlanContradicted") == ("False", "Replanned")
    running = settled(after(stopped, new))
    found = plan_of(running)
    assert (found.nodes, found.plan.number, found.replans) == (1, 2, 1)
    assert not needs_view(running)
    calm = step(running, 90)
    assert calm.scales == () and "StatefulSet" not in kinds(calm)


def test_job_that_stopped_for_a_better_plan_waits_if_others_have_taken_its_devices() -> None:
    """Fixed bug: it started with its old plan, and its pods found no nodes until the start time-out."""
    observed = with_updated_profile(slow())
    moving = after(observed, step(observed, 30))
    down = after(moving, step(moving, 31))
    busy = replace(CPUS, nodes=tuple(replace(node, free_cpu=0.0) for node in CPUS.nodes))
    stopped = report(down, RunPhase.STOPPED, step=510, steps=100_000)
    down = replace(down, pods=(), report=stopped, view=busy)
    waiting = step(down, 60)
    assert verdict(waiting, "Admitted") == ("False", "NoPlan") and "StatefulSet" not in kinds(waiting)
    assert verdict(waiting, "Running") == ("False", "NotStarted")
    freed = replace(after(down, waiting), view=CPUS)
    new = step(freed, 70)
    assert verdict(new, "PlanContradicted") == ("False", "Replanned") and "StatefulSet" in kinds(new)


def test_job_that_stopped_waits_for_its_volume_with_a_plan_for_free_devices() -> None:
    """Fixed bug: when its claim was back, the job started with its old plan, whose devices others used."""
    claims = {"mine": ClaimSeen("mine", "Bound", ("ReadWriteMany",))}
    observed = with_updated_profile(slow({**LONG, "checkpoint": {"volume": {"claimName": "mine"}}}, claims))
    moving = after(observed, step(observed, 30))
    down = after(moving, step(moving, 31))
    down = replace(down, pods=(), report=report(down, RunPhase.STOPPED, step=510, steps=100_000), claims={})
    waiting = step(down, 60)
    assert verdict(waiting, "VolumeReady") == ("False", "ClaimNotFound") and "StatefulSet" not in kinds(waiting)
    back = replace(after(down, waiting), claims=claims)
    assert needs_view(back)
    new = step(back, 90)
    assert verdict(new, "PlanContradicted") == ("False", "Replanned") and plan_of(after(back, new)).nodes == 1


def test_better_plan_is_searched_once_per_plan() -> None:
    observed = slow()  # the profile is unchanged, and so is the best plan
    judged = step(observed, 30)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    later = after(observed, judged)
    assert not needs_view(later)
    assert (step(later, 600).scales, step(later, 600).measurements) == ((), None)


def test_change_of_cpu_requests_alone_is_not_a_better_plan() -> None:
    """Slower steps change the CPU requests, but a restart improves nothing. The same holds for measured collectives."""
    slower = Learned(
        (LearnedPoint(32, 1.0, 50), LearnedPoint(96, 1.5, 50)), link_latency_s=1e-5, link_bandwidth_Bps=1e9
    )
    observed = slow(step_s=20.0)
    spec = parse_observed(observed).spec
    assert spec is not None
    observed = replace(observed, learned={(profile_key(spec), "cpu"): slower})
    judged = step(observed, 30)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    assert "still the best plan" in condition_of(judged, "PlanContradicted").message


def test_no_restart_if_it_costs_more_than_it_gains() -> None:
    observed = with_updated_profile(slow(step=99_999))
    judged = step(observed, 30)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    assert "including the restart" in condition_of(judged, "PlanContradicted").message


def test_wait_for_devices_at_the_first_start_is_no_part_of_a_restart() -> None:
    """Fixed bug: a job that had waited in the queue for a day was never moved to a better plan."""
    observed = with_updated_profile(slow())
    day_s = 86_400_000.0
    startup = {"admissionSeconds": day_s, "totalSeconds": day_s + 25.0}
    observed = replace(observed, job=replace(observed.job, status={**observed.job.status, "startup": startup}))
    judged = step(observed, 30)
    assert verdict(judged, "PlanContradicted") == ("True", "Replanning"), condition_of(judged, "PlanContradicted")


def test_steps_within_the_prediction_again_are_reported() -> None:
    observed = slow()
    mended = replace(observed, report=report(observed, step=900, steps=100_000, step_s=1e-4))
    assert verdict(step(mended, WARM_S + 3), "PlanContradicted") == ("False", "AsPredicted")


@pytest.mark.parametrize(
    ("spec", "measured"),
    [
        ({**LONG, "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 3}]}}, {}),
        (LONG, {"step": 99}),
        (LONG, {"mismatches": [Mismatch(rank=1, planned="cpu", found="other")]}),
        (LONG, {"plan_number": 7}),
    ],
    ids=["fixed", "first steps", "other devices", "another plan's report"],
)
def test_situations_in_which_the_prediction_is_not_checked(spec: Json, measured: Json) -> None:
    observed = training(spec, **{"step": 500, "steps": 100_000, "step_s": 2.0, **measured})
    desired = step(observed, WARM_S)
    assert "PlanContradicted" not in {c.type for c in status(desired).conditions}
    assert desired.measurements is None


def test_restarted_ranks_are_not_compared_with_the_prediction_at_once() -> None:
    """A job that resumes from a checkpoint is past its first steps, but the caches of its processes are cold."""
    suspended = changed(training(LONG, step=500, steps=100_000, step_s=1e-3), suspend=True)
    empty = settled(after(suspended, step(suspended, 100)))
    resumed = changed(after(empty, step(empty, 110)), suspend=False)
    starting = settled(after(resumed, step(resumed, 120)))
    running = replace(starting, report=report(starting, step=501, steps=100_000, step_s=2.0))
    assert verdict(step(running, 130), "Running") == ("True", "Running")
    cold = after(running, step(running, 130))
    assert "PlanContradicted" not in {c.type for c in status(step(cold, 131)).conditions}
    assert verdict(step(cold, 130 + WARM_S), "PlanContradicted") == ("True", "SlowerThanPredicted")


def test_plan_that_the_volume_does_not_support_is_not_better() -> None:
    """The claim of a job on one node is ReadWriteOnce, so the pods of a plan with three nodes would never start."""
    one_node = Learned(
        (LearnedPoint(32, 0.02, 50), LearnedPoint(96, 0.02, 50)), link_latency_s=1.0, link_bandwidth_Bps=1e5
    )
    spec = {**LONG, "nodes": {"min": 1, "max": 3}}
    first = seen(spec)
    first = replace(first, learned={(profile_key(parsed_spec(first)), "cpu"): one_node})
    observed = settled(after(first, step(first)))
    assert plan_of(observed).nodes == 1
    [(name, claim)] = observed.claims.items()
    assert claim.access_modes == ("ReadWriteOnce",)
    three_nodes = Learned(
        (LearnedPoint(32, 0.01, 50), LearnedPoint(96, 2.0, 50)), link_latency_s=1e-4, link_bandwidth_Bps=1e9
    )
    observed = replace(observed, learned={(profile_key(parsed_spec(first)), "cpu"): three_nodes})
    for modes, expected in ((("ReadWriteOnce",), "NoBetterPlan"), (("ReadWriteMany",), "Replanning")):
        running = replace(observed, claims={name: replace(claim, access_modes=modes)})
        running = replace(running, report=report(running, step=500, steps=100_000, step_s=2.0))
        running = after(running, step(running))
        running = after(running, step(running, WARM_S))
        judged = step(running, WARM_S + 10)
        assert verdict(judged, "PlanContradicted") == ("True", expected)
        assert judged.scales == ()
    # The claim supported the plan at the decision, but no longer when the pods should stop.
    moving = replace(after(running, judged), claims=observed.claims)
    stays = step(moving, WARM_S + 11)
    assert verdict(stays, "PlanContradicted") == ("True", "NoBetterPlan")
    assert "ReadWriteMany" in condition_of(stays, "PlanContradicted").message
    assert stays.scales == ()


def test_replanning_stops_after_three_times() -> None:
    observed = slow()
    accepted = plan_of(observed).model_copy(update={"replans": 3})
    exhausted = with_updated_profile(replace(observed, plan=accepted.data()))
    assert not needs_view(exhausted)
    desired = step(exhausted, 30)
    assert verdict(desired, "PlanContradicted") == ("True", "SlowerThanPredicted")


@pytest.mark.parametrize("reason", ["SlowerThanPredicted", "Replanning", "NoBetterPlan"])
def test_plan_contradicted_is_reset_for_a_new_spec(reason: str) -> None:
    """The plan of a new spec has no verdict: it is neither replaced at once nor exempt from replanning."""
    observed = slow()
    if reason == "Replanning":
        observed = with_updated_profile(observed)
    if reason != "SlowerThanPredicted":
        judged = step(observed, 30)
        assert verdict(judged, "PlanContradicted") == ("True", reason)
        observed = after(observed, judged)
    edited = step(changed(observed, steps=90_000), 31)
    assert verdict(edited, "PlanContradicted") == ("False", "Replanned")
