"""Tests of the transfer of measurements from one device to another."""

import pytest

from dljob.calibrate import LearnedPoint
from dljob.cluster.catalogue import gpu_or_assumed
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.workload.workload import builtin
from dljob.planner import Learned
from dljob.planner.candidates.cost.transfer import MAX_BATCHES, carried
from support.planner_questions import A100, RESNET, T4, decided, view

V100 = "Tesla-V100-SXM2-16GB"
WORKLOAD = builtin("resnet50", "synthetic-images")


def measured(label: str, times_catalogue: float, batches: tuple[int, ...] = (8, 16, 32, 64)) -> Learned:
    """Return points that take ``times_catalogue`` times as long as the catalogue predicts."""
    curve = catalogue_curve(WORKLOAD, gpu_or_assumed(label))
    return Learned(tuple(LearnedPoint(b, times_catalogue * curve.seconds(b), 10) for b in batches))


def slowness(label: str, points: list[tuple[int, float]]) -> float:
    curve = catalogue_curve(WORKLOAD, gpu_or_assumed(label))
    return points[-1][1] / curve.seconds(points[-1][0])


def test_slowdown_transfers_to_the_other_device() -> None:
    fast, slow = (
        carried("resnet50", V100, WORKLOAD, {("resnet50", T4): measured(T4, factor)})[0] for factor in (1.0, 2.5)
    )
    assert slowness(V100, slow) == pytest.approx(2.5 * slowness(V100, fast), rel=0.05)
    assert slowness(V100, fast) == pytest.approx(1.0, rel=0.5)


def test_more_devices_narrow_the_interval() -> None:
    one = {("resnet50", T4): measured(T4, 1.5)}
    two = {**one, ("resnet50", V100): measured(V100, 1.5)}
    assert carried("resnet50", A100, WORKLOAD, two)[1] < carried("resnet50", A100, WORKLOAD, one)[1] < 0.5


def test_only_the_same_model_on_catalogue_gpus_is_used() -> None:
    points = measured(T4, 1.0)
    assert carried("resnet50", V100, WORKLOAD, {("bert", T4): points}) == ([], 0.0)
    assert carried("resnet50", V100, WORKLOAD, {("resnet50", "abacus"): points}) == ([], 0.0)
    assert carried("resnet50", "abacus", WORKLOAD, {("resnet50", T4): points}) == ([], 0.0)
    assert carried("resnet50", V100, WORKLOAD, {("resnet50", T4): Learned()}) == ([], 0.0)


def test_number_of_transferred_batches_is_limited() -> None:
    many = {("resnet50", T4): measured(T4, 1.0, tuple(range(1, 65)))}
    points, _ = carried("resnet50", V100, WORKLOAD, many)
    assert len(points) == MAX_BATCHES
    assert (points[0][0], points[-1][0]) == (1, 64)


def test_plan_uses_measurements_of_another_device() -> None:
    """A job ran 2.5 times slower on T4s than predicted. The plan for the A100 is slower and less uncertain."""
    cluster = view({"device": A100, "devices": 2, "cpu": 16, "memory": "128Gi"})
    before = decided(RESNET, cluster).chosen.prediction
    after = decided(RESNET, cluster, {("resnet50", T4): measured(T4, 2.5)}).chosen.prediction
    assert after.step_s > 1.3 * before.step_s
    assert after.step_p90_s / after.step_s < before.step_p90_s / before.step_s
