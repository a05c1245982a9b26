"""Decisions about hardware probes of the operator: one at a time, once per class, never beside pods of jobs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.learned import Learned
from dljob.cluster.hardware import KEY, Hardware
from dljob.reconcile.hardware_probes import MAX_STARTS, RETRY_S, ProbePod, Remove, Start, Starts, Store, decide
from support.planner_questions import view

POOL = view({"count": 2, "cpu": 4, "device": "a"}, {"count": 2, "cpu": 8, "device": "b"})
KNOWN_A = {(KEY, "a"): Learned(hardware=Hardware())}
KNOWN = KNOWN_A | {(KEY, "b"): Learned(hardware=Hardware())}
POD = ProbePod("p", "a", "n0-0", "Running", "", 5.0)
PHASES = st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"])


def test_one_class_after_another_is_measured() -> None:
    (first,) = decide(POOL, {}, (), {}, (), False)
    assert isinstance(first, Start)
    assert first.target.device == "a"
    (second,) = decide(POOL, KNOWN_A, (), {}, (), False)
    assert isinstance(second, Start)
    assert second.target.device == "b"
    assert decide(POOL, KNOWN, (), {}, (), False) == ()


@pytest.mark.parametrize(
    ("starts", "device"),
    [
        (Starts(1, RETRY_S), "a"),
        (Starts(1, RETRY_S - 1), "b"),
        (Starts(MAX_STARTS, 1e9), "b"),
    ],
)
def test_a_class_is_tried_a_few_times_with_pauses_and_does_not_hold_up_others(starts: Starts, device: str) -> None:
    (found,) = decide(POOL, {}, (), {"a": starts}, (), False)
    assert isinstance(found, Start)
    assert found.target.device == device


def test_a_job_on_the_same_machine_stops_a_probe_and_delays_the_next() -> None:
    """Nodes of one machine share its cores, so the probe would measure a part of them and slow down the job."""
    pool = view({"count": 2, "cpu": 4, "device": "a", "machine": "host-1"}, {"count": 2, "cpu": 4, "device": "b"})
    (found,) = decide(pool, {}, (POD,), {}, {"n0-1"}, False)
    assert isinstance(found, Remove) and found.for_job
    (start,) = decide(pool, {}, (), {}, {"n0-1"}, False)
    assert isinstance(start, Start) and start.target.device == "b"


def test_a_finished_pod_is_stored_and_a_class_that_is_known_meanwhile_is_not() -> None:
    done = replace(POD, phase="Succeeded")
    assert decide(POOL, {}, (done,), {}, (), False) == (Store(done),)
    (found,) = decide(POOL, KNOWN_A, (done,), {}, (), False)
    assert isinstance(found, Remove)


@pytest.mark.parametrize(
    ("pod", "busy", "waiting", "why"),
    [
        (POD, {"n0-0"}, False, "job began"),
        (replace(POD, phase="Pending"), (), True, "jobs wait"),
        (replace(POD, phase="Failed", message="out of memory"), (), False, "out of memory"),
        (replace(POD, age_s=1e4), (), False, "Running after"),
    ],
)
def test_a_pod_that_is_in_the_way_or_useless_is_deleted(pod: ProbePod, busy: set[str], waiting: bool, why: str) -> None:
    (found,) = decide(POOL, {}, (pod,), {}, busy, waiting)
    assert isinstance(found, Remove)
    assert why in found.why


def test_nothing_disturbs_a_running_probe() -> None:
    assert decide(POOL, {}, (POD,), {}, {"n0-1"}, True) == ()


@given(
    phases=st.lists(st.tuples(st.sampled_from(["a", "b"]), PHASES, st.floats(0, 2000)), max_size=3),
    busy=st.sets(st.sampled_from(["n0-0", "n0-1", "n1-0", "n1-1"])),
    waiting=st.booleans(),
    counts=st.dictionaries(st.sampled_from(["a", "b"]), st.integers(1, 5)),
)
def test_never_two_at_a_time_and_never_beside_a_job(
    phases: list[tuple[str, str, float]], busy: set[str], waiting: bool, counts: dict[str, int]
) -> None:
    pods = [ProbePod(f"p{i}", d, f"n{i}-0", phase, "", age) for i, (d, phase, age) in enumerate(phases)]
    starts = {device: Starts(count, 1e6) for device, count in counts.items()}
    actions = decide(POOL, {}, pods, starts, busy, waiting)
    begun = [action.target for action in actions if isinstance(action, Start)]
    assert len(begun) <= (not pods and not waiting)
    assert not {target.node for target in begun} & busy
    assert all(starts.get(target.device, Starts(0, 0)).count < MAX_STARTS for target in begun)
    kept = [p for p in pods if p not in [a.pod for a in actions if isinstance(a, Store | Remove)]]
    assert all(pod.phase in ("Pending", "Running", "Unknown") and pod.node not in busy for pod in kept)
