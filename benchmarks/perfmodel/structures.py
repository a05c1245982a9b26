"""Measure step time and memory of the random networks of the hardware probe, and of built-in models."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dlcontract.hardware import ReferenceNet
from dlcontract.structures import MIN_STRUCTURES, structures
from dljob.perf.workload.datasets import DATASETS
from dltrain.hardware_probe.structures import first_step, in_own_process
from dltrain.models import InputShape, build


@dataclass(frozen=True)
class Measured:
    cpu_s: float
    """CPU time of a step."""
    grown_nbytes: int
    """Peak memory of the process minus its memory before the model was built."""


def measured(make: Callable[[], Callable[[], None]]) -> Measured:
    """Measure a step in a forked process, as the hardware probe does. ``make``: see ``in_own_process``.

    This process has imported PyTorch but computed nothing, because PyTorch's threads do not survive a fork.
    """
    cpu_s, grown_KiB = in_own_process(make)
    if not cpu_s:
        raise SystemExit("a measuring process exited early; it may have run out of memory")
    return Measured(cpu_s, 1024 * grown_KiB)


def of_built_in(name: str, dataset: str, batch: int) -> Callable[[], None]:
    """Return a training step like the trainer's: SGD with momentum; gradient buffers persist between steps."""
    data, tokens = DATASETS[dataset], dataset == "synthetic-tokens"
    shape = (batch, *data.shape)
    x = torch.randint(0, data.classes, shape) if tokens else torch.randn(shape)
    y = torch.randint(0, data.classes, shape if tokens else (batch,))
    model: nn.Module = build(name, InputShape(data.shape, data.classes, tokens))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        logits = model(x)
        cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return run


def key_of(net: ReferenceNet) -> str:
    """Return a network as text, by which the rows of a file name it."""
    return json.dumps([net.shape, net.layers, net.batches])


def collected(count: int, budget_s: float, file: Path | None) -> tuple[list[ReferenceNet], list[Measured]]:
    """Measure the first ``count`` networks, or as many as the budget allows.

    ``file``: measurements of earlier runs, which are not measured again; new ones are appended. Rows of releases that
    drew other networks are ignored.
    """
    rows: dict[str, Measured] = {}
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[json.dumps(row["structure"])] = Measured(**row["measured"])
    began = time.perf_counter()
    wanted = structures(count)
    for net in wanted:
        key = key_of(net)
        if key in rows or time.perf_counter() - began > budget_s:
            continue
        rows[key] = measured(partial(first_step, net))
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"structure": json.loads(key), "measured": vars(rows[key])}) + "\n")
    done = [net for net in wanted if key_of(net) in rows]
    if len(done) < MIN_STRUCTURES:
        raise SystemExit(
            f"found {len(done)} measured structures; expected at least {MIN_STRUCTURES}. Increase --seconds."
        )
    return done, [rows[key_of(net)] for net in done]
