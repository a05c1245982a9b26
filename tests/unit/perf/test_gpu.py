"""Tests of the performance model against measurements on a GPU: an H200, PyTorch 2.11, benchmarks/gpu/predictions.py."""

import pytest

from dlcontract import Precision
from dljob.cluster import catalogue
from dljob.perf.resources import energy, memory
from dljob.perf.step.compute import active_part, catalogue_curve
from dljob.perf.workload.workload import builtin, in_precision

H200 = catalogue.gpu_or_assumed("NVIDIA-H200")


def test_steps_bound_by_the_host_of_a_gpu_match_measurements() -> None:
    """(Model, dataset, batch, precision) → measured seconds."""
    measured_s: dict[tuple[str, str, int, Precision], float] = {
        ("mlp", "digits", 256, "FP32"): 2.4e-3,
        ("digits-cnn", "digits", 256, "FP32"): 3.0e-3,
        ("resnet18", "synthetic-images", 32, "FP32"): 14.7e-3,
        ("resnet50", "synthetic-images", 32, "FP32"): 27.8e-3,
        ("resnet50", "synthetic-images", 32, "BF16"): 33.2e-3,
        ("gpt-mini", "synthetic-tokens", 8, "FP32"): 8.6e-3,
        ("gpt-mini", "synthetic-tokens", 8, "BF16"): 10.8e-3,
    }
    for (model, dataset, batch, precision), seconds in measured_s.items():
        w = in_precision(builtin(model, dataset), precision)
        assert catalogue_curve(w, H200).seconds(batch) == pytest.approx(seconds, rel=0.25), (model, precision)
        assert active_part(w, H200, batch) < 0.2


@pytest.mark.parametrize(
    ("model", "batch", "precision", "allocated_mib"),
    [
        ("mlp", 256, "FP32", 67), ("digits-cnn", 256, "FP32", 132), ("lenet", 256, "FP32", 86),
        ("resnet18", 32, "FP32", 362), ("resnet18", 256, "FP32", 1395), ("resnet18", 256, "BF16", 1714),
        ("resnet50", 32, "FP32", 1138), ("resnet50", 32, "BF16", 1388), ("resnet50", 256, "FP32", 6638),
        ("resnet50", 256, "BF16", 8367), ("gpt-mini", 8, "FP32", 111), ("gpt-mini", 8, "BF16", 98),
        ("gpt-mini", 64, "FP32", 365), ("gpt-mini", 64, "BF16", 252),
    ],
)  # fmt: skip
def test_no_rank_on_a_gpu_needs_more_memory_than_predicted(
    model: str, batch: int, precision: Precision, allocated_mib: int
) -> None:
    """CUDA itself took up to 841 MiB."""
    needed = memory.rank_nbytes(in_precision(builtin(model, None), precision), batch, True) / 2**20
    assert 1.0 <= needed / (allocated_mib + 841) < 1.2


@pytest.mark.parametrize(
    ("model", "batch", "watts"),
    [("resnet18", 32, 190), ("resnet50", 256, 535), ("gpt-mini", 8, 160), ("gpt-mini", 64, 227)],
)
def test_power_of_a_gpu_depends_on_the_part_in_which_it_works(model: str, batch: int, watts: float) -> None:
    """Before this was measured, all were planned with 544 W."""
    w = builtin(model, None)
    assert energy.device_watts(H200, 1.0, active_part(w, H200, batch)) == pytest.approx(watts, rel=0.15)


def test_a_large_batch_keeps_a_gpu_busy_and_a_cpu_always_is() -> None:
    w = builtin("resnet50", None)
    parts = [active_part(w, H200, b) for b in (1, 32, 128, 512, 4096)]
    assert parts == sorted(parts) and parts[0] < 0.1 and parts[-1] == pytest.approx(1.0)
    assert active_part(w, catalogue.cpu("cpu", 1.0), 1) == 1.0
