"""Tests of all or nothing: a job whose pods cannot all run stops them, waits, and is planned again."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import RunPhase
from dljob.api import Phase
from dljob.job.observed import Observed, PodSeen, Stuck
from dljob.reconcile import needs_view
from dljob.reconcile.gang import MOST_BACK_OFF_S, back_off_s
from support.builders import DIGITS, NOW, Json, after, changed, nodes, plan_of, report, seen, settled
from support.job_lifecycle import DOWN, condition_of, done, gone, started, status, step, training, verdict

TIMEOUT: Json = {"scheduling": {"startTimeout": "60s"}}


def with_pods(observed: Observed, change: dict[int, PodSeen | str | None]) -> Observed:
    """Return the job after its pods were created, with some of them changed: None: missing, text: unschedulable."""
    pods = []
    for i, pod in enumerate(settled(observed).pods):
        other = change.get(i, pod)
        if isinstance(other, str):
            pods.append(replace(pod, node=None, ready=False, unschedulable=other))
        elif other is not None:
            pods.append(other)
    return replace(observed, pods=tuple(pods))


def half_started(spec: Json | None = None, problem: PodSeen | str | None = "0/3 nodes are available") -> Observed:
    """Return a job with two ready pods and one that cannot start, as the operator first sees it."""
    first = seen(DIGITS | TIMEOUT | (spec or {}))
    observed = with_pods(after(first, step(first)), {2: problem})
    if problem is None:
        [item] = observed.sets
        observed = replace(observed, sets=(replace(item, problem="exceeded quota: pods=2"),))
    return after(observed, step(observed, 1))


STUCK = PodSeen("digits-cpu-2", "u", "cpu", node="n2", stuck=Stuck("ImagePullBackOff", "no such image", "x"))


@pytest.mark.parametrize("problem", ["0/3 nodes are available", None, STUCK])
def test_gang_that_cannot_start_is_released_as_a_whole(problem: PodSeen | str | None) -> None:
    """Fixed bug: a three-node job under a quota of two pods held two pods without limit."""
    observed = half_started(problem=problem)
    waiting = step(observed, 59)
    assert verdict(waiting, "Admitted") == ("True", "Starting") and not waiting.scales
    assert waiting.requeue_after_s is not None and waiting.requeue_after_s <= 2
    released = step(observed, 62)
    assert released.scales == DOWN and not released.objects and released.plan is None
    assert verdict(released, "Admitted") == ("False", "StartTimedOut")
    assert status(released).phase is Phase.PENDING and status(released).start_timeouts == 1
    message = condition_of(released, "Admitted").message
    assert (
        "the start time-out of 60 s (spec.scheduling.startTimeout)" in message
        and condition_of(waiting, "PodsReady").message in message
    )
    assert [event.reason for event in released.events if event.reason == "StartTimedOut"] == ["StartTimedOut"]


def released_at(observed: Observed, at_s: float) -> Observed:
    """Return the job after it stopped all pods at ``at_s``."""
    return replace(after(observed, step(observed, at_s)), pods=())


def test_released_pods_are_not_started_again_while_they_stop() -> None:
    """Fixed bug: they were, without a plan and a back-off, if the operator looked before they were gone."""
    observed = half_started()
    stopping = after(observed, step(observed, 70))
    stopping = replace(
        stopping,
        pods=tuple(replace(pod, deleting=True) for pod in observed.pods[:1]),
        sets=tuple(replace(item, replicas=0, made_replicas=1) for item in observed.sets),
    )
    later = step(stopping, 71)
    assert not later.objects and not later.scales and later.plan is None
    assert verdict(later, "Admitted") == ("False", "StartTimedOut")


def test_released_job_is_planned_again_on_what_is_free_after_the_back_off() -> None:
    observed = released_at(half_started({"nodes": {"min": 2, "max": 3}}), 70)
    assert needs_view(observed)
    early = step(observed, 71)
    assert not early.objects and not early.scales and early.requeue_after_s is not None
    smaller = replace(observed, view=nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi"}))
    back = step(smaller, 70 + early.requeue_after_s + 5)
    assert verdict(back, "Admitted") == ("True", "Starting")
    again = after(smaller, back)
    assert (plan_of(again).nodes, plan_of(again).plan.number) == (2, 2)
    ready = settled(again)
    assert status(step(ready, 200)).start_timeouts == 0
    assert verdict(step(ready, 200), "Admitted") == ("True", "Started")


@pytest.mark.parametrize("way", ["another spec", "suspended and resumed"])
def test_user_who_corrects_the_cause_waits_for_no_long_back_off(way: str) -> None:
    """Fixed bug: the job waited for up to 15 minutes after its next time-out, for those with the wrong spec."""
    observed, at_s = half_started(), 70.0
    for n in range(3):
        observed = released_at(observed, at_s)
        assert status(step(observed, at_s)).start_timeouts == n + 1
        at_s += 1000
        again = after(observed, step(observed, at_s))
        observed = with_pods(again, {2: "0/3 nodes are available"})
        observed = after(observed, step(observed, at_s + 1))
        at_s += 70
    if way == "another spec":
        edited = changed(observed, seed=7)
    else:
        suspended = changed(observed, suspend=True)
        down = replace(after(suspended, step(suspended, at_s)), pods=())
        assert status(step(down, at_s)).start_timeouts == 0
        edited = changed(after(down, step(down, at_s)), suspend=False)
    stopped = replace(after(edited, step(edited, at_s)), pods=())
    again = after(stopped, step(stopped, at_s + 1))
    assert status(step(stopped, at_s + 1)).start_timeouts == 0
    waits = with_pods(again, {2: "0/3 nodes are available"})
    waits = after(waits, step(waits, at_s + 2))
    assert status(step(waits, at_s + 72)).start_timeouts == 1


def test_time_outs_count_while_the_spec_stays() -> None:
    observed = released_at(half_started(), 70)
    assert status(step(changed(observed, nodes={"min": 3, "max": 3}), 71)).start_timeouts == 1


def test_clock_that_was_ahead_lengthens_no_back_off() -> None:
    """Fixed bug: after a clock that was a day ahead at the time-out, the job waited for a day."""
    observed = released_at(half_started(), 86_400)
    corrected = step(observed, 71)
    assert corrected.requeue_after_s is not None and corrected.requeue_after_s <= 60
    back = step(after(observed, corrected), 71 + corrected.requeue_after_s)
    assert verdict(back, "Admitted") == ("True", "Starting")


def test_clock_that_was_ahead_lengthens_no_start_time_out() -> None:
    first, day_s = seen(DIGITS | TIMEOUT), 86_400.0
    observed = with_pods(after(first, step(first, day_s)), {2: "0/3 nodes are available"})
    observed = after(observed, step(observed, day_s + 1))
    corrected = step(observed, 5)
    assert corrected.requeue_after_s is not None and corrected.requeue_after_s <= 60
    released = step(after(observed, corrected), 66)
    assert verdict(released, "Admitted") == ("False", "StartTimedOut")


def test_released_job_waits_while_no_plan_is_possible() -> None:
    observed = released_at(half_started(), 70)
    full = replace(observed, view=nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi"}))
    waiting = step(full, 300)
    assert not waiting.objects and verdict(waiting, "Admitted") == ("False", "NoPlan")
    assert "continues with plan" not in condition_of(waiting, "Planned").message
    assert needs_view(after(full, waiting))
    back = step(replace(after(full, waiting), view=observed.view), 400)
    assert [s.replicas for s in after(full, back).sets] == [3]


def test_back_off_doubles_for_each_release_in_a_row() -> None:
    observed, at_s, waits = half_started(), 70.0, []
    for _ in range(3):
        observed = released_at(observed, at_s)
        first = step(observed, at_s + 1).requeue_after_s
        assert first is not None
        waits.append(first + 1)
        at_s += waits[-1] + 1
        observed = after(observed, step(observed, at_s))
        observed = with_pods(observed, {2: "0/3 nodes are available"})
        observed = after(observed, step(observed, at_s + 1))
        at_s += 62
    assert [round(wait / waits[0]) for wait in waits] == [1, 2, 4]


@pytest.mark.parametrize(
    "pod",
    [
        PodSeen("digits-cpu-2", "u", "cpu", node="n2", stuck=Stuck("ContainerCreating", "")),
        PodSeen("digits-cpu-2", "u", "cpu", node="n2"),
    ],
)
def test_slow_image_pull_is_no_obstacle(pod: PodSeen) -> None:
    observed = half_started(problem=pod)
    assert not step(observed, 3600).scales


def test_others_that_train_are_not_stopped_for_a_lost_pod() -> None:
    observed = training(DIGITS | TIMEOUT)
    lost = with_pods(observed, {2: "0/3 nodes are available"})
    lost = after(lost, step(lost, 10))
    assert not step(lost, 3600).scales
    stopped = replace(lost, report=report(lost, RunPhase.RESTARTING))
    stopped = after(stopped, step(stopped, 20))
    assert step(stopped, 3600).scales == DOWN
    assert verdict(step(stopped, 3600), "Admitted") == ("False", "StartTimedOut")


def test_pods_on_a_lost_node_are_fenced_before_the_job_releases_the_others() -> None:
    observed = training(DIGITS | TIMEOUT)
    lost = replace(
        with_pods(observed, {2: replace(observed.pods[2], ready=False)}), report=report(observed, RunPhase.RESTARTING)
    )
    lost = replace(lost, lost_nodes={str(observed.pods[2].node): NOW})
    lost = after(lost, step(lost, 1))
    assert not step(lost, 100_000).scales


def test_job_that_resumes_is_planned_on_what_is_there() -> None:
    """Fixed bug: a three-node plan resumed on a one-node cluster and asked for three pods."""
    observed = training(DIGITS | {"nodes": {"min": 1, "max": 3}})
    suspended = gone(replace(observed, job=replace(observed.job, spec={**observed.job.spec, "suspend": True})))
    suspended = after(suspended, step(suspended, 100))
    small = replace(suspended, view=nodes({"name": "n", "cpu": 2, "memory": "4Gi"}))
    resumed = replace(small, job=replace(small.job, spec={**small.job.spec, "suspend": False}))
    back = step(resumed, 200)
    assert plan_of(after(resumed, back)).nodes == 1
    assert verdict(back, "Admitted") == ("True", "Starting")


def test_finished_job_is_never_planned_again() -> None:
    ended = after(done(), step(done()))
    assert not needs_view(ended)


def test_running_job_of_an_older_release_is_admitted() -> None:
    observed = started()
    conditions = [c for c in observed.job.status.get("conditions", ()) if c["type"] != "Admitted"]
    old = replace(observed, job=replace(observed.job, status={**observed.job.status, "conditions": conditions}))
    assert not needs_view(old)
    assert verdict(step(old, 5), "Admitted") == ("True", "Started") and not step(old, 5).scales


@pytest.mark.parametrize("timeout_s", [0.0, 1e-7, 0.5])
def test_back_off_grows_however_short_the_start_timeout_is(timeout_s: float) -> None:
    """Fixed bug: with a start time-out of 0 s, a job was planned, started and stopped again without any pause."""
    waits = [back_off_s(n, timeout_s, "uid") for n in range(1, 20)]
    assert waits[0] >= 0.75 and waits[-1] >= 0.75 * MOST_BACK_OFF_S


@given(st.integers(1, 100), st.floats(1, 1e5), st.uuids())
@pytest.mark.hypothesis
def test_back_off_grows_to_a_limit(timeouts: int, timeout_s: float, uid: object) -> None:
    waits = [back_off_s(n, timeout_s, str(uid)) for n in range(1, timeouts + 1)]
    assert waits == sorted(waits)
    assert 0 < waits[0] <= 1.25 * min(30, timeout_s) and waits[-1] <= 1.25 * MOST_BACK_OFF_S
    assert timedelta(seconds=waits[-1])
