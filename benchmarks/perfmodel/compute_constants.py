"""Measure the constants of the compute model on this machine's CPU, and compare predicted and measured step times.

    python -m benchmarks.perfmodel.compute_constants [--json]

It prints the constants of ``dljob.perf.step.compute`` and ``dljob.perf.resources.memory``: operations per second of a
core, overhead per layer and per step of a GPU's host, and memory of a process. Then it prints the step times of the
built-in models on one thread, measured and predicted as for CPU ranks (``dljob.perf.workload.structure``, which is not
fitted to these models).
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dlcontract import DatasetRef
from dljob.cluster import catalogue
from dljob.perf.step.compute import LAYER_OVERHEAD_S, STEP_OVERHEAD_S, catalogue_curve
from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.workload import builtin
from dltrain.data.datasets import load
from dltrain.models import InputShape, build

CASES = (
    ("mlp", "digits", (8, 64, 512)),
    ("digits-cnn", "digits", (8, 32, 96)),
    ("lenet", "synthetic-images", (8, 32, 96)),
    ("gpt-mini", "synthetic-tokens", (2, 8)),
    ("resnet18", "synthetic-images", (2, 8)),
    ("resnet50", "synthetic-images", (2, 8)),
)


def timed_s(run: Callable[[], Any], budget_s: float = 2.0) -> float:
    """Return the median CPU time of ``run`` after two warm-up calls. CPU time excludes other processes."""
    run()
    run()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < budget_s:
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def train_step(model: nn.Module, shape: tuple[int, ...], classes: int, batch: int, tokens: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randint(0, classes, (batch, *shape)) if tokens else torch.randn(batch, *shape)
    y = torch.randint(0, classes, (batch, *shape) if tokens else (batch,))

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = cross_entropy(model(x).reshape(-1, classes), y.reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return run


def making_s(dataset: str) -> float:
    """Return the time to generate a sample of a synthetic dataset."""
    source, chosen = load(DatasetRef(name=dataset)), np.arange(64)
    return timed_s(lambda: source.train(chosen), 1.0) / len(chosen)


def overheads_s() -> tuple[float, float]:
    """Return the overhead (per layer, per step): slope and intercept over the depth of tiny networks."""

    def depth_s(layers: int) -> float:
        model = nn.Sequential(*[m for _ in range(layers // 2) for m in (nn.Linear(4, 4), nn.ReLU())])
        return timed_s(train_step(model, (4,), 4, 2, False), 1.0)

    few, many = depth_s(4), depth_s(64)
    per_layer = (many - few) / 60
    return per_layer, few - 4 * per_layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    product_FLOPs = 2 * 1024**3 / timed_s(lambda: torch.mm(a, b, out=a.new_empty(1024, 1024)), 1.0)
    x, y = torch.zeros(2**26), torch.zeros(2**26)
    copy_Bps = 2 * x.nbytes / timed_s(lambda: y.copy_(x), 1.0)
    layer_s, step_s = overheads_s()
    rows: list[dict[str, Any]] = []
    device = catalogue.cpu("cpu", 1.0)
    for name, dataset, batches in CASES:
        data, tokens = DATASETS[dataset], dataset == "synthetic-tokens"
        model = build(name, InputShape(data.shape, data.classes, tokens))
        curve = catalogue_curve(builtin(name, dataset), device)
        for batch in batches:
            measured = timed_s(train_step(model, data.shape, data.classes, batch, tokens))
            rows.append({"model": name, "batch": batch, "measured_s": measured, "predicted_s": curve.seconds(batch)})
    making_us = {name: making_s(name) * 1e6 for name, known in DATASETS.items() if known.making_s}
    result = {
        "product_GFLOPs": product_FLOPs / 1e9,
        "copy_GBps": copy_Bps / 1e9,
        "layer_overhead_us": {"measured": layer_s * 1e6, "assumed": LAYER_OVERHEAD_S * 1e6},
        "step_overhead_us": {"measured": step_s * 1e6, "assumed": STEP_OVERHEAD_S * 1e6},
        "making_us": {n: {"measured": s, "assumed": DATASETS[n].making_s * 1e6} for n, s in making_us.items()},
        "imported_MiB": imported / 2**20,
        "steps": rows,
    }
    if as_json:
        print(json.dumps(result))
        return
    print(f"matrix product {result['product_GFLOPs']:.0f} GFLOP/s, copy {result['copy_GBps']:.1f} GB/s, one core")
    print(f"overhead per layer {layer_s * 1e6:.0f} us (assumed {LAYER_OVERHEAD_S * 1e6:.0f}), ", end="")
    print(f"per step {step_s * 1e6:.0f} us (assumed {STEP_OVERHEAD_S * 1e6:.0f})")
    for name, us in making_us.items():
        print(f"generating a sample of {name} {us:.0f} us (assumed {DATASETS[name].making_s * 1e6:.0f})")
    print(f"process after import {result['imported_MiB']:.0f} MiB")
    print(f"{'model':12} {'batch':>6} {'measured':>11} {'predicted':>11} {'ratio':>6}")
    for row in rows:
        m, p = row["measured_s"], row["predicted_s"]
        print(f"{row['model']:12} {row['batch']:6} {m * 1e3:8.2f} ms {p * 1e3:8.2f} ms {p / m:6.2f}")


if __name__ == "__main__":
    main()
