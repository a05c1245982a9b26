"""Tests of measured power: profiles learn it from runs with readable counters, and predictions of energy use it."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from dlcontract import RankMeasure, Report, RunPhase
from dljob.api import DLProfileStatus
from dljob.calibrate import Learned
from dljob.cluster import catalogue
from dljob.job.profiles import learned, updated_profile
from dljob.perf.resources import energy
from support.planner_questions import A100, RESNET, decided, view

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GPUS = view({"count": 2, "device": A100, "devices": 4, "cpu": 32, "memory": "256Gi"})
WAITING_W = energy.device_watts(catalogue.gpu_or_assumed(A100), 0.0)


def ended(power_W: float | None, compute_s: float = 0.3, wait_s: float = 0.1, device: str = A100) -> Report:
    measure = RankMeasure(rank=0, device=device, share=64, compute_s=compute_s, wait_s=wait_s, power_W=power_W)
    return Report(
        uid="u", plan_number=1, plan_digest="d", term=1, phase=RunPhase.SUCCEEDED, unix_s=0.0, ranks=(measure,),
        step_s=compute_s + wait_s,
    )  # fmt: skip


def watts(
    report: Report,
    before: DLProfileStatus | None = None,
    layout: tuple[int, int] | None = None,
    used_cores: float | None = None,
) -> float | None:
    device = "cpu" if layout else A100
    found = updated_profile(
        before or DLProfileStatus(), "resnet50", device, report, NOW, layout=layout, used_cores=used_cores
    )
    return found.computing_watts


def test_waiting_is_taken_out_of_the_measured_power() -> None:
    assert watts(ended(300.0, wait_s=0.0)) == pytest.approx(300)
    assert watts(ended(0.75 * 300 + 0.25 * WAITING_W)) == pytest.approx(300)


def test_power_of_cpus_is_for_one_cpu() -> None:
    assert watts(ended(60.0, wait_s=0.0, device="cpu"), layout=(4, 3)) == pytest.approx(5)


def test_power_of_a_part_of_a_cpu_is_for_one_whole_cpu() -> None:
    """Fixed bug: the power of one thread on a fifth of a CPU was stored as that of a whole CPU."""
    assert watts(ended(1.2, wait_s=0.0, device="cpu"), layout=(1, 1), used_cores=0.2) == pytest.approx(6)
    assert watts(ended(6.0, wait_s=0.0, device="cpu"), layout=(4, 2), used_cores=0.5) == pytest.approx(6)


def test_power_that_was_not_measured_changes_nothing() -> None:
    before = DLProfileStatus(computing_watts=200)
    assert watts(ended(None), before) == 200
    assert watts(ended(300.0, compute_s=0.01, wait_s=1.0), before) == 200, "the rank hardly computed"


def test_power_of_several_runs_is_averaged() -> None:
    assert watts(ended(400.0, wait_s=0.0), DLProfileStatus(computing_watts=100)) == pytest.approx(200)


def test_profile_keeps_the_power() -> None:
    assert learned(DLProfileStatus(computing_watts=123.0)).computing_W == 123.0


def joules(computing_W: float | None) -> float:
    known = {} if computing_W is None else {("resnet50", A100): Learned(computing_W=computing_W)}
    found = decided(replace(RESNET, minimize="Energy"), GPUS, known).chosen.prediction.energy_J
    assert found is not None
    return found


def test_measured_power_replaces_the_assumption() -> None:
    device = catalogue.gpu_or_assumed(A100)
    assumed_W = energy.device_watts(device, 1.0)
    assert joules(assumed_W) == pytest.approx(joules(None))
    assert joules(0.8 * assumed_W) < joules(None) < joules(1.2 * assumed_W)


def test_power_that_a_device_cannot_have_is_limited() -> None:
    device = catalogue.gpu_or_assumed(A100)
    assert joules(100 * device.peak_power_W) == joules(energy.MAX_OF_PEAK * device.peak_power_W)
    assert joules(0.01) == joules(device.idle_power_W)


@pytest.mark.parametrize(
    "device", ["NVIDIA-GeForce-RTX-5090", "NVIDIA-L20", f"{A100}-MIG-3g.20gb", "NVIDIA-H100-80GB-HBM3-MIG-4g.40gb"]
)
def test_gpu_that_the_catalogue_does_not_know_learns_its_times(device: str) -> None:
    """A time that is a hundred times shorter than that of a CPU is no mistake."""
    report = ended(None, compute_s=0.1, wait_s=0.0, device=device)
    measured = RankMeasure(rank=0, device=device, share=256, compute_s=0.1)
    found = updated_profile(
        DLProfileStatus(), "resnet50", device, report.model_copy(update={"ranks": (measured,)}), NOW
    )
    assert [(point.batch, point.seconds) for point in found.compute] == [(256, pytest.approx(0.1))]
