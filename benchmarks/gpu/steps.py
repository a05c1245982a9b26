"""Measure bare training steps on a GPU: elapsed time, time of its kernels, memory and power. Compare with predictions.

    python -m benchmarks.gpu.steps [--json FILE] [--model resnet50] [--seconds 1.5]

Each case (model, samples, precision) trains in a plain PyTorch loop on a batch in GPU memory, without the trainer. The
elapsed time of a step is the mean over the given seconds. The time of the kernels is the sum that PyTorch's profiler
records in a few steps: a step cannot be shorter, and the rest of it is time in which the GPU waits for its host. Memory
is the largest that PyTorch allocated, and power the mean by NVML's energy counter. Ratios are predicted / measured: of
the step, of its kernels, and of the power of the GPU alone.
"""

import argparse
import json
import sys
import time
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.lib.figures import machine
from torch.profiler import ProfilerActivity, profile

from dljob.cluster import catalogue
from dljob.perf.resources.energy import device_watts
from dljob.perf.resources.memory import GPU_CONTEXT_NBYTES, rank_nbytes
from dljob.perf.step.compute import active_part, kernels_curve, roofline
from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.workload import builtin, in_precision
from dltrain.builtin.evaluation import mean_loss
from dltrain.device.energy import meter
from dltrain.device.precision import TYPES
from dltrain.device.rank_device import product_label
from dltrain.models import InputShape, build

CASES = (
    ("mlp", "digits", (32, 512, 8192)),
    ("digits-cnn", "digits", (32, 512, 8192)),
    ("lenet", "synthetic-images", (32, 512, 8192)),
    ("resnet18", "synthetic-images", (8, 64, 256, 1024, 4096)),
    ("resnet50", "synthetic-images", (8, 32, 128, 512, 1024)),
    ("gpt-mini", "synthetic-tokens", (4, 32, 128, 512)),
)
"""Model, dataset, and numbers of samples in a step."""
PROFILED = 4
MIB = 2**20


def measured(model: str, dataset: str, batch: int, precision: str, seconds: float) -> dict[str, Any]:
    """Return what the steps of a case need."""
    torch.manual_seed(0)
    data = DATASETS[dataset]
    device = torch.device("cuda", 0)
    network = build(model, InputShape(data.shape, data.classes, data.tokens)).to(device)
    size = (batch, *data.shape)
    if data.tokens:
        x, y = (torch.randint(0, data.classes, size, device=device) for _ in range(2))
    else:
        x, y = torch.randn(size, device=device), torch.randint(0, data.classes, (batch,), device=device)
    opt = torch.optim.SGD(network.parameters(), 1e-4, momentum=0.9)
    dtype = TYPES.get(precision)

    def step() -> None:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = mean_loss(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    counter = meter(device, 0)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        count += 5
    elapsed_s = time.perf_counter() - began
    used = counter.used() if counter is not None else None
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kernels = [each for each in found.events() if each.device_type.name == "CUDA"]
    return {
        "step_s": elapsed_s / count,
        "device_s": sum(each.device_time for each in kernels) / 1e6 / PROFILED,
        "kernels": len(kernels) / PROFILED,
        "allocated_nbytes": torch.cuda.max_memory_allocated(),
        "reserved_nbytes": torch.cuda.max_memory_reserved(),
        "power_W": used.joules / elapsed_s if used is not None else None,
    }


def predicted(model: str, dataset: str, batch: int, precision: Any, device: catalogue.Device) -> dict[str, float]:
    """Return what the performance model predicts from the data sheet."""
    workload = in_precision(builtin(model, dataset), precision)
    step_s, device_s = roofline(workload, device).seconds(batch), kernels_curve(workload, device).seconds(batch)
    return {
        "step_s": step_s,
        "device_s": device_s,
        "allocated_nbytes": rank_nbytes(workload, batch, True) - GPU_CONTEXT_NBYTES,
        "power_W": device_watts(device, 1.0, active_part(workload, device, batch)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file of rows to write")
    parser.add_argument("--model", choices=[model for model, *_ in CASES])
    parser.add_argument("--seconds", type=float, default=1.5, help="of each case; default: 1.5")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("found no GPU; this benchmark needs one", file=sys.stderr)
        return 2
    name = product_label(torch.cuda.get_device_name(0))
    device = catalogue.gpu_or_assumed(name)
    print(f"{name}; {machine()}")
    print("| case | step, ms (ratio) | kernels, ms (ratio) | kernels | memory, MiB (ratio) | power, W (ratio) |")
    print("|---" * 6 + "|")
    rows: list[dict[str, Any]] = []
    for model, dataset, batches in CASES:
        for precision in ("FP32", "BF16") if options.model in (None, model) else ():
            for batch in batches:
                row = {
                    "case": [model, batch, precision],
                    "measured": measured(model, dataset, batch, precision, options.seconds),
                    "predicted": predicted(model, dataset, batch, precision, device),
                }
                torch.cuda.empty_cache()
                rows.append(row)
                print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": name, "machine": machine(), "rows": rows}), encoding="utf-8")
    for key, words in (("step_s", "step"), ("device_s", "kernels"), ("power_W", "power")):
        errors = [abs(log(ratio)) for row in rows if (ratio := of(row, key))]
        middle, most = (100 * (exp(f(errors)) - 1) for f in (median, max))
        print(f"{words}: median error {middle:.0f} %, largest {most:.0f} %")
    ratios = [ratio for row in rows if (ratio := of(row, "allocated_nbytes"))]
    print(f"memory: {sum(r >= 1 for r in ratios)} of {len(ratios)} large enough, median ratio {median(ratios):.2f}")
    return 0


def of(row: dict[str, Any], key: str) -> float | None:
    """Return the ratio predicted / measured, or None if it was not measured."""
    return row["predicted"][key] / row["measured"][key] if row["measured"][key] else None


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [", ".join(map(str, row["case"]))]
    for key, factor, digits in (
        ("step_s", 1e3, 2),
        ("device_s", 1e3, 3),
        ("allocated_nbytes", 1 / MIB, 0),
        ("power_W", 1, 0),
    ):
        value, ratio = row["measured"][key], of(row, key)
        cells.append("-" if ratio is None else f"{factor * value:.{digits}f} ({ratio:.2f})")
    cells.insert(3, f"{row['measured']['kernels']:.0f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
