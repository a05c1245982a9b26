"""Measure the training time lost to a checkpoint of 10 MB to 1 GB of state, compared with torch.save and memcpy.

    hack/env python -m benchmarks.training.checkpoint [--sizes 10,100,1000] [--rounds 5] [--interval 60]

One process trains a stack of linear layers with Adam. Each step uses the whole state: parameters and two moments. It
saves as a job's loop does. Each round measures the trainer's checkpoint (a copy in memory, written by a thread),
``torch.save`` and fsync in the loop, and a plain copy of as many bytes.

``call_s``: duration of the call. ``stall_s``: ``call_s`` plus the slowdown of the steps until the checkpoint is
written, because the writer thread uses the same cores and memory. Threshold: ``stall_s`` is at most 2 % of --interval
(default: 60 s, as for jobs). ``least_interval_s`` is the shortest interval that meets it. Exit code 1 if it is missed.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from dltrain.checkpoint.background import Writer
from dltrain.checkpoint.state import Staging, capture
from dltrain.checkpoint.store import Checkpoints, identity

MAX_STALL_FRACTION = 0.02
WIDTH = 1024


class Training:
    """A model and its optimizer with about ``nbytes`` of state."""

    def __init__(self, nbytes: float) -> None:
        layers = max(1, round(nbytes / 3 / 4 / WIDTH**2))
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(32, WIDTH)
        self.step()
        self.nbytes = sum(p.nbytes for p in self.model.parameters()) * 3

    def step(self) -> float:
        """Train one step and return its seconds."""
        began = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return time.perf_counter() - began


def ours(training: Training, writer: Writer, staging: Staging, number: int, step_s: float) -> dict[str, float]:
    """Time one checkpoint and the training until it is durable. ``step_s``: time of a step without a checkpoint."""
    began = time.perf_counter()
    writer.begin(capture(number, training.model.state_dict(), training.optimizer.state_dict(), {}, staging))
    call_s = time.perf_counter() - began
    steps_s = list[float]()
    while writer.busy:
        steps_s.append(training.step())
    durable_s = time.perf_counter() - began
    writer.wait()
    return {"call_s": call_s, "stall_s": call_s + sum(steps_s) - len(steps_s) * step_s, "durable_s": durable_s}


def theirs(training: Training, path: Path) -> float:
    began = time.perf_counter()
    content = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def memcpy(nbytes: int) -> float:
    """Return the seconds of a copy into memory that was written before: the lower bound."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def measured(nbytes: float, rounds: int, folder: Path) -> dict[str, float]:
    """Return medians over rounds without the first one, which allocates memory."""
    training, staging = Training(nbytes), Staging()
    writer = Writer(Checkpoints(folder / "ours", identity("benchmark", training.model.state_dict()), keep=2), None)
    rows = list[dict[str, float]]()
    for number in range(rounds + 1):
        step_s = statistics.median(training.step() for _ in range(7))
        row = {"step_s": step_s} | ours(training, writer, staging, number, step_s)
        row |= {"torch_save_s": theirs(training, folder / "theirs"), "memcpy_s": memcpy(training.nbytes)}
        rows.append(row)
    result = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    return {"nbytes": training.nbytes, "first_call_s": rows[0]["call_s"]} | result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,100,1000", help="MB of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--folder", help="folder to write to (default: a temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    passed = True
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; seconds, medians")
    for size in map(float, options.sizes.split(",")):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            row = measured(1e6 * size, options.rounds, Path(folder))
        part = row["stall_s"] / options.interval
        passed &= part <= MAX_STALL_FRACTION
        row |= {"part_of_interval": part, "least_interval_s": row["stall_s"] / MAX_STALL_FRACTION}
        print(json.dumps({key: float(f"{value:.3g}") for key, value in row.items()}), flush=True)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
