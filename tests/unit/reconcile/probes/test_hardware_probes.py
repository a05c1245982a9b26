"""Decisions about hardware probes of the operator: one per machine, once per class, never beside pods of jobs."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.learned import Learned
from dljob.cluster.hardware import KEY, Hardware
from dljob.cluster.machines import neighbours
from dljob.reconcile.probes import (
    MAX_PODS,
    MAX_STARTS,
    RETRY_S,
    UNBOUND_S,
    Action,
    Ending,
    ProbePod,
    Remove,
    Start,
    Starts,
    Store,
    Subject,
    decide,
)
from support.planner_questions import T4, view

POOL = view({"count": 2, "cpu": 4, "device": "a"}, {"count": 2, "cpu": 8, "device": "b"})
KNOWN_A = {(KEY, "a"): Learned(hardware=Hardware())}
KNOWN = KNOWN_A | {(KEY, "b"): Learned(hardware=Hardware())}
POD = ProbePod("p", "a", "n0-0", "Running", "", 5.0)
PHASES = st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"])


def started(*arguments: Any) -> list[str]:
    """Return the device types that ``decide`` starts to measure."""
    return [action.target.device for action in decide(*arguments) if isinstance(action, Start)]


def ended(*arguments: Any) -> list[Action]:
    """Return how ``decide`` ends probe pods."""
    return [action for action in decide(*arguments) if not isinstance(action, Start)]


def test_classes_on_different_machines_are_measured_at_once() -> None:
    assert started(POOL, {}, (), {}, (), False) == ["a", "b"]
    assert started(POOL, KNOWN_A, (), {}, (), False) == ["b"]
    assert started(POOL, {}, (POD,), {}, (), False) == ["b"], "a is measured already"
    assert started(POOL, KNOWN, (), {}, (), False) == []


def test_classes_on_one_machine_are_measured_one_after_another() -> None:
    host = {"count": 2, "cpu": 4, "machine": "host-1"}
    pool = view({**host, "device": "a"}, {**host, "device": "b"}, {"count": 1, "cpu": 4, "device": "c"})
    assert started(pool, {}, (), {}, (), False) == ["a", "c"]
    assert started(pool, {}, (POD, replace(POD, device="c", node="n2-0")), {}, (), False) == []
    assert started(pool, KNOWN_A, (), {}, (), False) == ["b", "c"]


def test_pods_are_bounded_in_number() -> None:
    pool = view(*({"cpu": 4, "device": f"class-{i}"} for i in range(3 * MAX_PODS)))
    assert len(started(pool, {}, (), {}, (), False)) == MAX_PODS
    two = [replace(POD, name=f"p{i}", device=f"class-{i}", node=f"n{i}") for i in range(2)]
    assert len(started(pool, {}, two, {}, (), False)) == MAX_PODS - 2


@pytest.mark.parametrize(
    ("entry", "taken"),
    [
        ({"cpu": 8, "device": "b"}, {"free_cpu": 3.5}),
        ({"cpu": 8, "device": T4, "devices": 4}, {"free_devices": 3}),
        ({"cpu": 8, "device": T4, "devices": 4}, {"free_devices": 0}),
    ],
)
def test_no_class_is_measured_on_nodes_that_other_pods_use(entry: dict[str, Any], taken: dict[str, Any]) -> None:
    pool = view(entry)
    assert started(pool, {}, (), {}, (), False)
    busy = replace(pool, nodes=tuple(replace(node, **taken) for node in pool.nodes))
    assert started(busy, {}, (), {}, (), False) == []


def test_gpus_are_measured_only_if_the_administrator_wants_it() -> None:
    pool = view({"cpu": 8, "device": "b"}, {"cpu": 8, "device": T4, "devices": 4})
    assert started(pool, {}, (), {}, (), False) == [T4, "b"]
    only_cpus = decide(pool, {}, (), {}, (), False, gpus=False)
    assert [action.target.device for action in only_cpus if isinstance(action, Start)] == ["b"]


@pytest.mark.parametrize(
    ("starts", "devices"),
    [
        (Starts(1, RETRY_S), ["a", "b"]),
        (Starts(1, RETRY_S - 1), ["b"]),
        (Starts(MAX_STARTS, 1e9), ["b"]),
    ],
)
def test_a_class_is_tried_a_few_times_with_pauses_and_does_not_hold_up_others(
    starts: Starts, devices: list[str]
) -> None:
    assert started(POOL, {}, (), {Subject("a"): starts}, (), False) == devices


def test_a_job_on_the_same_machine_stops_a_probe_and_delays_the_next() -> None:
    """Nodes of one machine share its cores, so the probe would measure a part of them and slow down the job."""
    pool = view({"count": 2, "cpu": 4, "device": "a", "machine": "host-1"}, {"count": 2, "cpu": 4, "device": "b"})
    (found,) = ended(pool, {}, (POD,), {}, {"n0-1"}, False)
    assert isinstance(found, Remove) and found.ending is Ending.GAVE_WAY
    (start,) = decide(pool, {}, (), {}, {"n0-1"}, False)
    assert isinstance(start, Start) and start.target.device == "b"


def test_a_finished_pod_is_stored_and_a_class_that_is_known_meanwhile_is_not() -> None:
    done = replace(POD, phase="Succeeded")
    assert ended(POOL, {}, (done,), {}, (), False) == [Store(done)]
    (found,) = ended(POOL, KNOWN_A, (done,), {}, (), False)
    assert isinstance(found, Remove) and found.ending is Ending.NOT_NEEDED


@pytest.mark.parametrize(
    ("pod", "busy", "waiting", "why"),
    [
        (POD, {"n0-0"}, False, "job began"),
        (replace(POD, phase="Pending"), (), True, "jobs wait"),
        (POD, {"n0-1"}, True, "jobs wait"),
        (replace(POD, phase="Pending", bound=False, age_s=UNBOUND_S + 1), (), False, "no scheduler"),
        (replace(POD, phase="Failed", message="out of memory"), (), False, "out of memory"),
        (replace(POD, age_s=1e4), (), False, "Running after"),
    ],
)
def test_a_pod_that_is_in_the_way_or_useless_is_deleted(pod: ProbePod, busy: set[str], waiting: bool, why: str) -> None:
    (found,) = ended(POOL, {}, (pod,), {}, busy, waiting)
    assert isinstance(found, Remove)
    assert why in found.why


def test_jobs_on_other_machines_do_not_disturb_a_running_probe() -> None:
    assert decide(POOL, {}, (POD,), {}, {"n0-1", "n1-0", "n1-1"}, False) == ()
    assert decide(POOL, {}, (replace(POD, phase="Pending", age_s=UNBOUND_S + 1),), {}, {"n1-0", "n1-1"}, False) == ()


@given(
    phases=st.lists(st.tuples(st.sampled_from(["a", "b"]), PHASES, st.floats(0, 2000)), max_size=3),
    busy=st.sets(st.sampled_from(["n0-0", "n0-1", "n1-0", "n1-1"])),
    waiting=st.booleans(),
    counts=st.dictionaries(st.sampled_from(["a", "b"]), st.integers(1, 5)),
)
def test_never_two_of_a_class_or_machine_and_never_beside_a_job(
    phases: list[tuple[str, str, float]], busy: set[str], waiting: bool, counts: dict[str, int]
) -> None:
    pods = [ProbePod(f"p{i}", d, f"n{i}-0", phase, "", age) for i, (d, phase, age) in enumerate(phases)]
    starts = {Subject(device): Starts(count, 1e6) for device, count in counts.items()}
    actions = decide(POOL, {}, pods, starts, busy, waiting)
    begun = [action.target for action in actions if isinstance(action, Start)]
    assert len(begun) <= (0 if waiting else max(0, MAX_PODS - len(pods)))
    devices, nodes = [target.device for target in begun], [target.node for target in begun]
    assert len({*devices, *(pod.device for pod in pods)}) == len(devices) + len({pod.device for pod in pods})
    assert not set(nodes) & neighbours(POOL.nodes, busy | {pod.node for pod in pods}) and len(set(nodes)) == len(nodes)
    assert all(starts.get(Subject(target.device), Starts(0, 0)).count < MAX_STARTS for target in begun)
    kept = [p for p in pods if p not in [a.pod for a in actions if isinstance(a, Store | Remove)]]
    assert all(pod.phase in ("Pending", "Running", "Unknown") and pod.node not in busy for pod in kept)
