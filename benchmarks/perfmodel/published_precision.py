"""Compare first predictions of training steps in float32 and in 16 bits with published times of GPUs.

    hack/env python -m benchmarks.perfmodel.published_precision [--json]

All rows are PyTorch on one GPU, or on GPUs whose communication is a small part of the step. ``ratio`` is predicted /
published time. Sources:

NVIDIA: the README of ResNet-50 v1.5 in DeepLearningExamples (container 21.03, 1 GPU, real data; autocast with channels
last; batch sizes of its file configs.yml). "FP32" is TF32 on the A100.
u39kun: github.com/u39kun/deep-learning-benchmark, forward and backward pass of 16 images without an update, in models
converted to float16 (PyTorch 0.3 on the V100, 1.0 on the RTX 2080 Ti).
Narayanan: Narayanan et al. 2021, table 1: 137 TFLOP/s per GPU for 1.7 billion parameters, batch 512 on 32 GPUs, with
the recomputation of activations, and with attention in several kernels (``large_models``).
"""

import argparse
import json
import statistics
from math import exp, log, sqrt
from typing import NamedTuple

from benchmarks.perfmodel.large_models import MEGATRON, MEGATRON_2B

from dlcontract import Precision
from dljob.cluster import catalogue
from dljob.perf.step.compute import roofline
from dljob.perf.workload.workload import Workload, in_precision, recomputing, reference

V100, A100, RTX = "Tesla-V100-SXM2-16GB", "NVIDIA-A100-SXM4-80GB", "NVIDIA-GeForce-RTX-2080-Ti"
V100_32 = "Tesla-V100-SXM2-32GB"
GPT_STEP_S = 96 * 16 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51_200 / (16 * 24 * 2304)) / 137e12
"""Seconds for 16 samples per GPU, by Narayanan's formula of the operations of 24 layers with 2,304 hidden features."""


class Row(NamedTuple):
    """A published step: the seconds for ``batch`` samples on a GPU."""

    source: str
    model: str
    device: str
    batch: int
    precision: Precision
    published_s: float


PUBLISHED = (
    Row("NVIDIA", "ResNet-50", A100, 256, "FP32", 256 / 938),
    Row("NVIDIA", "ResNet-50", V100, 112, "FP32", 112 / 367),
    Row("NVIDIA", "ResNet-50", V100_32, 112, "FP32", 112 / 356),
    Row("u39kun", "ResNet-152", V100, 16, "FP32", 0.1365),
    Row("u39kun", "VGG-16", V100, 16, "FP32", 0.0835),
    Row("u39kun", "ResNet-152", RTX, 16, "FP32", 0.1425),
    Row("u39kun", "VGG-16", RTX, 16, "FP32", 0.0955),
    Row("NVIDIA", "ResNet-50", A100, 256, "FP16", 256 / 2470),
    Row("NVIDIA", "ResNet-50", V100, 256, "FP16", 256 / 1200),
    Row("NVIDIA", "ResNet-50", V100_32, 256, "FP16", 256 / 1156),
    Row("u39kun", "ResNet-152", V100, 16, "FP16", 0.0929),
    Row("u39kun", "VGG-16", V100, 16, "FP16", 0.0588),
    Row("u39kun", "ResNet-152", RTX, 16, "FP16", 0.0986),
    Row("u39kun", "VGG-16", RTX, 16, "FP16", 0.0681),
    Row("Narayanan", "GPT 1.7B", A100, 16, "FP16", GPT_STEP_S),
)


def workload(model: str) -> Workload:
    """Return the workload of a published model in float32."""
    if model == "GPT 1.7B":
        return MEGATRON_2B.gpt(MEGATRON)
    return reference(model)


def ratio(row: Row) -> float:
    """Return predicted / published time of a step."""
    device = catalogue.gpu(row.device)
    assert device is not None
    model = in_precision(workload(row.model), row.precision)
    model = recomputing(model) if row.source == "Narayanan" else model
    return roofline(model, device).seconds(row.batch) / row.published_s


def spread(ratios: list[float]) -> float:
    """Return the root mean square of log(ratio), which ``perf.step.step.SPREAD`` assumes."""
    return sqrt(statistics.fmean(log(each) ** 2 for each in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = [(row, ratio(row)) for row in PUBLISHED]
    spreads = {name: spread([r for row, r in found if row.precision == name]) for name in ("FP32", "FP16")}
    if given.json:
        print(json.dumps({"rows": [row._asdict() | {"ratio": r} for row, r in found], "spread": spreads}, indent=1))
        return
    for row, r in found:
        print(f"{row.source:10} {row.model:11} {row.device:27} {row.batch:4} {row.precision}  {r:.2f}")
    for name, value in spreads.items():
        print(f"{name}: root mean square of log(ratio) {value:.2f}, a factor of {exp(value):.2f}")


if __name__ == "__main__":
    main()
