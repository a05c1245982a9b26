"""Compare training steps in float32 and in 16 bits on this machine's CPU: time, and memory kept for the backward pass.

    hack/env python -m benchmarks.training.precision [--rounds 9]

Each round trains one step in each precision, one after the other. ``time_ratio`` is the median over rounds of (seconds
in 16 bits / seconds in float32). ``kept_ratio`` is the ratio of the bytes per sample that autograd keeps, without
parameters. CPUs and GPUs differ in the layers that autocast computes in float32; tests/trainer/models/test_workload.py
has the bytes for GPUs.
"""

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dljob.perf.workload.datasets import DATASETS
from dltrain.builtin.evaluation import mean_loss
from dltrain.device.precision import TYPES
from dltrain.models import InputShape, build

CASES = {"mlp": ("digits", 64), "resnet18": ("synthetic-images", 2), "gpt-mini": ("synthetic-tokens", 2)}


def batch_of(dataset: str, samples: int) -> tuple[Tensor, Tensor]:
    data = DATASETS[dataset]
    shape = (samples, *data.shape)
    if data.tokens:
        return torch.randint(0, data.classes, shape), torch.randint(0, data.classes, shape)
    return torch.randn(shape), torch.randint(0, data.classes, (samples,))


def step_s(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype | None) -> float:
    """Return the seconds of a forward and a backward pass."""
    model.zero_grad()
    began = time.perf_counter()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = mean_loss(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - began


def kept_nbytes(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> int:
    """Return the bytes that autograd keeps in a forward pass, including copies of parameters, but not parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def record(tensor: Any) -> Any:
        if (address := tensor.untyped_storage().data_ptr()) not in parameters:
            kept[address] = tensor  # so that its address is not used again
        return tensor

    casting = torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    with saved_tensors_hooks(record, lambda tensor: tensor), casting:
        model(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, (dataset, samples) in CASES.items():
        data = DATASETS[dataset]
        model = build(name, InputShape(data.shape, data.classes, data.tokens))
        x, y = batch_of(dataset, samples)
        full = kept_nbytes(model, x, None) - kept_nbytes(model, x[: samples // 2], None)
        for precision, dtype in TYPES.items():
            step_s(model, x, y, None)
            step_s(model, x, y, dtype)
            ratios = [step_s(model, x, y, dtype) / step_s(model, x, y, None) for _ in range(rounds)]
            half = kept_nbytes(model, x, dtype) - kept_nbytes(model, x[: samples // 2], dtype)
            rows.append(
                {
                    "model": name,
                    "precision": precision,
                    "time_ratio": round(statistics.median(ratios), 2),
                    "kept_ratio": round(half / full, 2),
                }
            )
    print(json.dumps({"machine": platform.processor(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
