"""Tests of profiles of CPU devices, which store the cores of a rank and the ranks of a node with each measurement."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from dlcontract import RankMeasure, Report, RunPhase
from dljob.api import DLJobSpec, DLProfileStatus
from dljob.calibrate import Learned, LearnedPoint, Measured, Place, learn
from dljob.calibrate.compute import MAX_POINTS
from dljob.job.plan.pod_groups import PodGroup, threads
from dljob.job.plan.request import planner_request
from dljob.job.profiles import learned, updated_profile
from dljob.planner.candidates.pools import cores_of_rank
from support.builders import DIGITS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GROUP = PodGroup("cpu", "cpu", is_gpu=False, nodes=1, ranks_per_node=2, cpu_m=6000, memory_nbytes=2**30)


def ended(ranks: int, compute_s: float, step_s: float = 0.5) -> Report:
    measures = tuple(RankMeasure(rank=r, device="cpu", share=48, compute_s=compute_s) for r in range(ranks))
    return Report(
        uid="u", plan_number=1, plan_digest="d", term=1, phase=RunPhase.SUCCEEDED, unix_s=0.0, ranks=measures,
        step_s=step_s,
    )  # fmt: skip


def test_measurements_with_different_cores_are_not_averaged() -> None:
    one = updated_profile(DLProfileStatus(), "program-1", "cpu", ended(1, 0.4), NOW, layout=(1, 1))
    both = updated_profile(one, "program-1", "cpu", ended(1, 0.1), NOW, layout=(8, 1))
    points = {(p.cores, p.ranks): p.compute_s for p in learned(both).points}
    assert points == {(1, 1): pytest.approx(0.4), (8, 1): pytest.approx(0.1)}
    again = updated_profile(both, "program-1", "cpu", ended(1, 0.4), NOW, layout=(8, 1))
    assert {(p.cores, p.ranks): p.compute_s for p in learned(again).points} == {
        (1, 1): pytest.approx(0.4), (8, 1): pytest.approx(0.2),
    }  # fmt: skip


def test_steps_on_several_ranks_are_stored_with_their_cores() -> None:
    found = updated_profile(DLProfileStatus(), "program-1", "cpu", ended(2, 0.4), NOW, Place(1, 2), layout=(3, 2))
    assert [(s.place.cores, s.place.node_devices) for s in learned(found).steps] == [(3, 2)]
    assert [(p.cores, p.ranks) for p in learned(found).points] == [(3, 2)]
    other = updated_profile(found, "program-1", "cpu", ended(2, 0.9, 1.0), NOW, Place(2, 1), layout=(1, 1))
    assert {s.place.cores for s in learned(other).steps} == {1, 3}


def test_measurements_on_a_shared_machine_are_not_averaged_with_others() -> None:
    alone = updated_profile(DLProfileStatus(), "program-1", "cpu", ended(3, 0.2), NOW, Place(3, 1), layout=(1, 1))
    both = updated_profile(
        alone, "program-1", "cpu", ended(3, 0.4, 0.9), NOW, Place(3, 1), layout=(1, 1), machine_nodes=3
    )
    found = learned(DLProfileStatus.model_validate(both.manifest()))
    assert {p.machine_nodes: p.compute_s for p in found.points} == {1: pytest.approx(0.2), 3: pytest.approx(0.4)}
    assert {s.place.machine_nodes: s.step_s for s in found.steps} == {1: pytest.approx(0.5), 3: pytest.approx(0.9)}


def test_gpus_are_measured_without_their_machine() -> None:
    ranks = (RankMeasure(rank=0, device="t4", share=48, compute_s=0.1),)
    report = ended(1, 0.1).model_copy(update={"ranks": ranks})
    found = learned(updated_profile(DLProfileStatus(), "program-1", "t4", report, NOW, Place(2, 1), machine_nodes=2))
    assert {p.machine_nodes for p in found.points} == {1}


def test_profiles_of_earlier_releases_are_read() -> None:
    status = DLProfileStatus.model_validate({"compute": [{"batch": 8, "seconds": 0.5}]})
    assert learned(status).points == (LearnedPoint(8, 0.5, 1, None, 1),)


def test_points_stay_bounded_with_many_layouts() -> None:
    known = Learned()
    for cores in range(1, MAX_POINTS + 10):
        known = replace(
            known, points=learn(known, [Measured(8, 1 / cores), Measured(16, 2 / cores)], cores=cores).points
        )
        assert len(known.points) <= MAX_POINTS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 3),
        ({"resources": {"cpu": "5"}}, 2),
        ({"resources": {"cpuLimit": "2500m"}}, 1),
        ({"trainer": {"env": [{"name": "OMP_NUM_THREADS", "value": "7"}]}}, 7),
        ({"trainer": {"env": [{"name": "OMP_NUM_THREADS", "value": " 4,2"}]}}, 4),
        ({"trainer": {"env": [{"name": "OMP_NUM_THREADS", "value": "0"}]}}, 3),
    ],
)
def test_threads_of_a_rank_follow_request_limit_and_environment(changes: dict[str, object], expected: int) -> None:
    assert threads(DLJobSpec.model_validate(DIGITS | changes), GROUP) == expected


@pytest.mark.parametrize("cpu", ["2", "6"])
@pytest.mark.parametrize("value", ["3", "7", None])
def test_plans_count_the_cores_that_profiles_store(cpu: str, value: str | None) -> None:
    """Fixed bug: with OMP_NUM_THREADS, plans counted other cores than the measurements of their runs had."""
    env = [{"name": "OMP_NUM_THREADS", "value": value}] if value else []
    spec = DLJobSpec.model_validate(DIGITS | {"resources": {"cpu": cpu}, "trainer": {"env": env}})
    asked = planner_request("digits", spec)
    group = replace(GROUP, ranks_per_node=1, cpu_m=1000 * int(cpu))
    assert cores_of_rank(8.0, 1, asked) == threads(spec, group)
