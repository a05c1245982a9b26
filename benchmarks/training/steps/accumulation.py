"""Compare time, memory and all-reduces of gradient accumulation with the plan, on two ranks of this machine.

    hack/env python -m benchmarks.training.steps.accumulation [--rounds 3] [--model gpt-mini] [--batch 64]

The built-in trainer runs with strategy Data and AdamW. Each rank divides its part of the batch into k micro-batches,
where k is 1, 2, 4 and 8. For each k, the table has:

- ``cpu``: processor time of both ranks for a step, the difference between runs of different lengths.
- ``formula``: the same by the planner's formula k (C(b / k) - u) + u, where C is measured: the time of a step whose
  whole batch is one micro-batch. u is the time of the update, measured in this process. Communication counts in C, so
  the formula takes k all-reduces instead of one: the ratio is below 1 by what k - 1 of them take.
- ``peak``: the largest memory of a rank beside its process, and ``plan``: what the plan adds to that of a process.
- ``all-reduces``: bytes of gradients that ranks sum in a step, divided by those without accumulation.

Goals: plan / peak is at least 1 and at most 1.3 at the median, a step takes at most 1.05 times the formula, and sums as
many bytes as one without accumulation.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.lib.figures import machine
from benchmarks.lib.goals import Figure, table
from benchmarks.lib.local_ranks import local_plan
from benchmarks.training.model_split.memory import MIB, rows_of_ranks
from benchmarks.training.ranks import model_part_memory

from dlcontract import CheckpointRef, DatasetRef, ModelRef, OptimizerRef
from dljob.perf.resources import memory
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.workload import builtin
from dltrain.launch.preload import preload

RANKS, STEPS = 2, (3, 13)
COUNTS = (1, 2, 4, 8)


def measured(model: str, batch: int, micro_batches: int, steps: int) -> dict[str, int]:
    """Return the largest memory of a rank beside its process, the processor time and the summed bytes of a run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = local_plan(
            [batch // RANKS] * RANKS, global_batch=batch, min_ranks=RANKS, model=ModelRef(name=model), steps=steps,
            dataset=DatasetRef(name=MODELS[model][1]), optimizer=OptimizerRef(name="AdamW", learning_rate=1e-3),
            checkpoint=CheckpointRef(enabled=False, directory=name), micro_batches=micro_batches,
        )  # fmt: skip
        rows = rows_of_ranks(wanted, model_part_memory.main, folder)
    peak = max(row["peak"] - row["started"] for row in rows)
    sums = {name: sum(row[name] for row in rows) for name in ("cpu_us", "reduced_nbytes")}
    return {"peak": peak, **sums}


def step_of(model: str, batch: int, micro_batches: int) -> dict[str, float]:
    """Return processor seconds and summed bytes of a step of all ranks, and the largest memory of a rank."""
    short, long = (measured(model, batch, micro_batches, steps) for steps in STEPS)
    more = STEPS[1] - STEPS[0]
    return {
        "cpu_s": 1e-6 * (long["cpu_us"] - short["cpu_us"]) / more,
        "sent": (long["reduced_nbytes"] - short["reduced_nbytes"]) / more,
        "peak": float(max(short["peak"], long["peak"])),
    }


def update_s(model: str) -> float:
    """Return the processor seconds of an update by AdamW of tensors of the model's size, on both ranks."""
    torch.set_num_threads(1)
    layers = [layer.parameters for layer in builtin(model, None).layers if layer.parameters]
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in layers]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer, times = torch.optim.AdamW(parameters), list[float]()
    for _ in range(12):
        begin = time.process_time()
        optimizer.step()
        times.append(time.process_time() - begin)
    return RANKS * statistics.median(times[2:])


def planned_nbytes(model: str, batch: int, micro_batches: int) -> float:
    """Return what the plan adds to the memory of a process."""
    workload = replace(builtin(model, None, "AdamW"), reuses_blocks=True)
    samples = -(-batch // RANKS // micro_batches)
    return float(memory.rank_nbytes(workload, samples, False) - memory.PROCESS_NBYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt-mini")
    parser.add_argument("--batch", type=int, default=64, help="global batch size, a multiple of 16")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    options = parser.parse_args()
    preload()
    found: dict[int, list[dict[str, float]]] = {k: [] for k in COUNTS}
    whole: dict[int, list[float]] = {k: [] for k in COUNTS}
    for _ in range(options.rounds):
        for k in COUNTS:
            found[k].append(step_of(options.model, options.batch, k))
            if k > 1:
                whole[k].append(step_of(options.model, options.batch // k, 1)["cpu_s"])
    once_s = update_s(options.model)  # After the forks: torch's threads do not survive one.
    print(f"{machine()}; {options.model}, batch {options.batch} on {RANKS} ranks; update {1e3 * once_s:.2f} ms")
    print("| micro-batches | cpu, ms | formula, ms (ratio) | peak, MiB | plan, MiB (ratio) | all-reduces |")
    print("|---" * 6 + "|")
    sent = statistics.median(each["sent"] for each in found[1])
    rows = list[dict[str, Any]]()
    for k in COUNTS:
        cpu_s, peak = (statistics.median(each[name] for each in found[k]) for name in ("cpu_s", "peak"))
        formula_s = cpu_s if k == 1 else k * (statistics.median(whole[k]) - once_s) + once_s
        plan = planned_nbytes(options.model, options.batch, k)
        reduces = statistics.median(each["sent"] for each in found[k]) / sent
        rows.append({"k": k, "cpu_s": cpu_s, "formula_s": formula_s, "peak": peak, "plan": plan, "reduces": reduces})
        print(
            f"| {k} | {1e3 * cpu_s:.1f} | {1e3 * formula_s:.1f} ({cpu_s / formula_s:.2f}) | {peak / MIB:.0f} "
            f"| {plan / MIB:.0f} ({plan / peak:.2f}) | {reduces:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rounds": options.rounds, "rows": rows}, indent=1))
    ratios = [row["plan"] / row["peak"] for row in rows]
    figures = [
        Figure("least plan / peak", min(ratios), low=1.0),
        Figure("median plan / peak", statistics.median(ratios), high=1.3),
        Figure("most cpu / formula", max(row["cpu_s"] / row["formula_s"] for row in rows), high=1.05),
        Figure("most all-reduces of a step", max(row["reduces"] for row in rows), high=1.001),
    ]
    print(table(figures))


if __name__ == "__main__":
    main()
