"""Plans that measurements contradict: updates of profiles, and when another plan replaces them or not."""

from dataclasses import replace
from typing import Any

import pytest

from dlcontract import Mismatch, RunPhase
from dljob.api import DLJobSpec
from dljob.job.identity import profile_key
from dljob.job.observed import Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from support.builders import DIGITS, Json, after, changed, plan_of, report, seen, settled
from support.job_lifecycle import DOWN, kinds, status, step, told, training, verdict

LONG: Json = {**DIGITS, "epochs": None, "steps": 100_000, "nodes": {"min": 1, "max": 3}}
WARM_S = 20.0
"""Long enough for MIN_STEPS steps as predicted."""
LONG = {key: value for key, value in LONG.items() if value is not None}
ALONE_IS_BETTER = Learned(
    (LearnedPoint(32, 0.01, 50), LearnedPoint(96, 0.03, 50)), link_latency_s=0.05, link_bandwidth_Bps=1e6
)


def slow(spec: Json = LONG, **news: Any) -> Observed:
    """Steps take far longer than the plan's p90."""
    fields: Json = {"step": 500, "steps": 100_000, "step_s": 2.0, **news}
    found = training(spec, **fields)
    assert plan_of(found).nodes == 3, "the case wants a plan of three nodes"
    return after(found, step(found, WARM_S))


def understood(observed: Observed) -> DLJobSpec:
    spec = parse_observed(observed).spec
    assert spec is not None
    return spec


def learned(observed: Observed) -> Observed:
    """Return the state after the profile was updated, according to which one node is better."""
    return replace(observed, learned={(profile_key(understood(observed)), "cpu"): ALONE_IS_BETTER})


def test_within_the_interval_nothing_is_said() -> None:
    observed = training(LONG, step=500, steps=100_000, step_s=1e-6)
    desired = step(observed, WARM_S)
    assert "PlanContradicted" not in {c.type for c in status(desired).conditions}
    assert desired.measurements is None and not needs_view(observed)


def test_profiles_are_updated_first_and_only_once() -> None:
    observed = training(LONG)
    noise = {"samples": 40.0, "steps": 500}
    observed = replace(observed, report=report(observed, step=500, steps=100_000, step_s=2.0, noise=noise))
    first = step(observed, WARM_S)
    assert first.measurements is not None and first.measurements.data is None, (
        "a noise scale is that of a whole training"
    )
    assert verdict(first, "PlanContradicted") == ("True", "SlowerThanPredicted")
    assert "found a step time of 2 s; expected 0.013 s (p90)" in told(first, "PlanContradicted").message
    assert any(event.reason == "SlowerThanPredicted" and event.type == "Warning" for event in first.events)
    again = step(after(observed, first), WARM_S + 1)
    assert again.measurements is None and again.scales == ()


def test_a_better_plan_replaces_the_plan_after_all_pods_stopped() -> None:
    observed = learned(slow())
    assert needs_view(observed)
    judged = step(observed, 30)
    assert verdict(judged, "PlanContradicted") == ("True", "Replanning")
    assert judged.scales == (), "decided first, done next"
    moving = after(observed, judged)
    assert needs_view(moving)
    leaving = step(moving, 31)
    assert leaving.scales == DOWN
    assert verdict(leaving, "Running") == ("False", "Restarting")
    gone = after(moving, leaving)
    gone = replace(gone, pods=(), report=report(gone, RunPhase.STOPPED, step=510, steps=100_000))
    new = step(gone, 60)
    assert verdict(new, "PlanContradicted") == ("False", "Replanned")
    running = settled(after(gone, new))
    found = plan_of(running)
    assert (found.nodes, found.plan.number, found.replans) == (1, 2, 1)
    assert not needs_view(running)
    calm = step(running, 90)
    assert calm.scales == () and "StatefulSet" not in kinds(calm)


def test_a_better_plan_is_searched_once_for_each_plan() -> None:
    observed = slow()  # nothing learned: the plan is as good as before
    judged = step(observed, 30)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    later = after(observed, judged)
    assert not needs_view(later)
    assert (step(later, 600).scales, step(later, 600).measurements) == ((), None)


def test_other_cpu_requests_alone_are_no_other_plan() -> None:
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
    assert "still the best plan" in told(judged, "PlanContradicted").message


def test_no_restart_if_it_costs_more_than_it_gains() -> None:
    observed = learned(slow(step=99_999))
    judged = step(observed, 30)
    assert verdict(judged, "PlanContradicted") == ("True", "NoBetterPlan")
    assert "including the restart" in told(judged, "PlanContradicted").message


def test_steps_within_the_prediction_again_are_reported() -> None:
    observed = slow()
    mended = replace(observed, report=report(observed, step=900, steps=100_000, step_s=1e-4))
    assert verdict(step(mended, WARM_S + 3), "PlanContradicted") == ("False", "AsPredicted")


@pytest.mark.parametrize(
    ("spec", "news"),
    [
        ({**LONG, "objective": {"minimize": "Energy"}}, {}),
        ({**LONG, "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 3}]}}, {}),
        (LONG, {"step": 99}),
        (LONG, {"mismatches": [Mismatch(rank=1, planned="cpu", found="other")]}),
        (LONG, {"plan_number": 7}),
    ],
    ids=["for energy", "fixed", "first steps", "other devices", "another plan's report"],
)
def test_situations_in_which_a_plan_is_not_judged(spec: Json, news: Json) -> None:
    observed = training(spec, **{"step": 500, "steps": 100_000, "step_s": 2.0, **news})
    desired = step(observed, WARM_S)
    assert "PlanContradicted" not in {c.type for c in status(desired).conditions}
    assert desired.measurements is None


def test_restarted_ranks_are_not_judged_at_once() -> None:
    """A job that resumes from a checkpoint is beyond its first steps, but the caches of its processes are cold."""
    suspended = changed(training(LONG, step=500, steps=100_000, step_s=1e-3), suspend=True)
    empty = settled(after(suspended, step(suspended, 100)))
    resumed = changed(after(empty, step(empty, 110)), suspend=False)
    starting = settled(after(resumed, step(resumed, 120)))
    running = replace(starting, report=report(starting, step=501, steps=100_000, step_s=2.0))
    assert verdict(step(running, 130), "Running") == ("True", "Running")
    cold = after(running, step(running, 130))
    assert "PlanContradicted" not in {c.type for c in status(step(cold, 131)).conditions}
    assert verdict(step(cold, 130 + WARM_S), "PlanContradicted") == ("True", "SlowerThanPredicted")


def test_a_plan_that_the_volume_does_not_support_is_not_better() -> None:
    """The claim of a job on one node is ReadWriteOnce, so the pods of a plan with three nodes would never start."""
    alone = Learned(
        (LearnedPoint(32, 0.02, 50), LearnedPoint(96, 0.02, 50)), link_latency_s=1.0, link_bandwidth_Bps=1e5
    )
    spec = {**LONG, "nodes": {"min": 1, "max": 3}}
    first = seen(spec)
    first = replace(first, learned={(profile_key(understood(first)), "cpu"): alone})
    observed = settled(after(first, step(first)))
    assert plan_of(observed).nodes == 1
    [(name, claim)] = observed.claims.items()
    assert claim.access_modes == ("ReadWriteOnce",)
    apart = Learned(
        (LearnedPoint(32, 0.01, 50), LearnedPoint(96, 2.0, 50)), link_latency_s=1e-4, link_bandwidth_Bps=1e9
    )
    observed = replace(observed, learned={(profile_key(understood(first)), "cpu"): apart})
    for modes, expected in ((("ReadWriteOnce",), "NoBetterPlan"), (("ReadWriteMany",), "Replanning")):
        running = replace(observed, claims={name: replace(claim, access_modes=modes)})
        running = replace(running, report=report(running, step=500, steps=100_000, step_s=2.0))
        running = after(running, step(running))
        running = after(running, step(running, WARM_S))
        judged = step(running, WARM_S + 10)
        assert verdict(judged, "PlanContradicted") == ("True", expected)
        assert judged.scales == ()
    # Decided while the claim could serve; when the pods are to leave it no longer can.
    moving = replace(after(running, judged), claims=observed.claims)
    stays = step(moving, WARM_S + 11)
    assert verdict(stays, "PlanContradicted") == ("True", "NoBetterPlan")
    assert "ReadWriteMany" in told(stays, "PlanContradicted").message
    assert stays.scales == ()


def test_replanning_stops_after_three_times() -> None:
    observed = slow()
    accepted = plan_of(observed).model_copy(update={"replans": 3})
    worn = learned(replace(observed, plan=accepted.data()))
    assert not needs_view(worn)
    desired = step(worn, 30)
    assert verdict(desired, "PlanContradicted") == ("True", "SlowerThanPredicted")


@pytest.mark.parametrize("reason", ["SlowerThanPredicted", "Replanning", "NoBetterPlan"])
def test_plan_contradicted_is_reset_for_a_new_spec(reason: str) -> None:
    """The plan of a new spec has no verdict: it is neither replaced at once nor exempt from replanning."""
    observed = slow()
    if reason == "Replanning":
        observed = learned(observed)
    if reason != "SlowerThanPredicted":
        judged = step(observed, 30)
        assert verdict(judged, "PlanContradicted") == ("True", reason)
        observed = after(observed, judged)
    edited = step(changed(observed, globalBatchSize=48), 31)
    assert verdict(edited, "PlanContradicted") == ("False", "Replanned")
