"""Generate CNNs and measure their step times and memory."""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dljob.perf.workload.datasets import DATASETS, Dataset
from dljob.perf.workload.layers import Net
from dljob.perf.workload.workload import Workload, of_layers
from dltrain.models import InputShape, build

SEED, CLASSES = 0, 10
MAX_FLOPS = 12e9
"""Maximum operations of a step: about a quarter of a second on one core, so that a run stays short."""
BUDGET_S, FEWEST_STEPS = 0.4, 4
MIN_STRUCTURES = 20


@dataclass(frozen=True)
class Structure:
    """A generated network: ``layers`` 3 x 3 convolutions, then a dense layer and an output layer.

    After every second convolution the network pools while at least 8 pixels are left; the number of filters doubles
    there, up to four times the initial number.
    """

    layers: int
    filters: int
    dense: int
    pixels: int
    batch: int

    def plan(self) -> list[tuple[int, bool]]:
        """Return (filters, is followed by pooling) of each convolution."""
        side, width, found = self.pixels, self.filters, []
        for i in range(self.layers):
            pooled = i % 2 == 1 and side >= 8
            found.append((width, pooled))
            if pooled:
                side, width = side // 2, min(2 * width, 4 * self.filters)
        return found

    def net(self) -> Net:
        net = Net(3, self.pixels, self.pixels)
        for filters, pooled in self.plan():
            net.conv(filters, 3).relu()
            if pooled:
                net.pool(2)
        return net.flatten().linear(self.dense).relu().linear(CLASSES)

    def workload(self) -> Workload:
        shape = (3, self.pixels, self.pixels)
        return of_layers("generated", self.net(), Dataset(0, 0, shape, CLASSES, 4 * 3 * self.pixels**2))

    def module(self) -> nn.Module:
        parts: list[nn.Module] = []
        channels, side = 3, self.pixels
        for filters, pooled in self.plan():
            parts += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
            channels = filters
            if pooled:
                parts.append(nn.MaxPool2d(2))
                side //= 2
        parts += [nn.Flatten(), nn.Linear(channels * side * side, self.dense), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(self.dense, CLASSES))


@dataclass(frozen=True)
class Measured:
    cpu_s: float
    """Median CPU time of a step."""
    grown_nbytes: int
    """Peak memory of the process minus its memory before the model was built."""


def drawn(count: int) -> list[Structure]:
    """Draw different structures log-uniformly, each with fewer than ``MAX_FLOPS`` operations per step."""
    rng = np.random.default_rng(SEED)
    found: dict[Structure, None] = {}
    while len(found) < count:
        one = Structure(
            layers=int(rng.integers(1, 9)),
            filters=int(2 ** rng.integers(2, 8)),
            dense=int(2 ** rng.integers(4, 11)),
            pixels=int(rng.choice([8, 12, 16, 24, 32, 48, 64])),
            batch=int(2 ** rng.integers(1, 9)),
        )
        if one.batch * one.workload().flops_per_sample < MAX_FLOPS:
            found[one] = None
    return list(found)


def steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """Return a training step like the trainer's: SGD with momentum; gradient buffers persist between steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        logits = model(x)
        cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return run


def resident_nbytes(field: str = "VmRSS") -> int:
    """Return the resident memory of this process, or its peak with ``VmHWM``."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measured(make: Callable[[], Callable[[], None]]) -> Measured:
    """Measure in a forked process.

    The parent has imported PyTorch but computed nothing, because PyTorch's threads do not survive a fork.
    """

    def run(answer: Any) -> None:
        torch.manual_seed(SEED)
        before = resident_nbytes()
        step = make()
        step()
        step()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < FEWEST_STEPS or time.perf_counter() - began < BUDGET_S:
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
        answer.send((statistics.median(times), resident_nbytes("VmHWM") - before))

    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    try:
        cpu_s, grown = mine.recv()
    except EOFError:
        raise SystemExit("a measuring process exited early; it may have run out of memory") from None
    finally:
        process.join()
    return Measured(cpu_s, grown)


def of_structure(one: Structure) -> Callable[[], None]:
    x = torch.randn(one.batch, 3, one.pixels, one.pixels)
    return steps(one.module(), x, torch.randint(0, CLASSES, (one.batch,)))


def of_built_in(name: str, dataset: str, batch: int) -> Callable[[], None]:
    data, tokens = DATASETS[dataset], dataset == "synthetic-tokens"
    shape = (batch, *data.shape)
    x = torch.randint(0, data.classes, shape) if tokens else torch.randn(shape)
    y = torch.randint(0, data.classes, shape if tokens else (batch,))
    return steps(build(name, InputShape(data.shape, data.classes, tokens)), x, y)


def prepare() -> None:
    """Make the first optimizer step here, so that its imports do not count for a structure."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def collected(count: int, budget_s: float, file: Path | None) -> tuple[list[Structure], list[Measured]]:
    """Measure the first ``count`` structures, or as many as the budget allows."""
    rows: dict[Structure, Measured] = {}
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[Structure(**row["structure"])] = Measured(**row["measured"])
    began = time.perf_counter()
    wanted = drawn(count)
    for one in wanted:
        if one in rows or time.perf_counter() - began > budget_s:
            continue
        rows[one] = measured(lambda one=one: of_structure(one))  # type: ignore[misc]
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"structure": asdict(one), "measured": asdict(rows[one])}) + "\n")
    done = [one for one in wanted if one in rows]
    if len(done) < MIN_STRUCTURES:
        raise SystemExit(
            f"found {len(done)} measured structures; expected at least {MIN_STRUCTURES}. Increase --seconds."
        )
    return done, [rows[one] for one in done]
