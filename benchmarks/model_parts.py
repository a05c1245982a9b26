"""Step time of a model in two parts against one process: pipeline stages over micro-batches, and split linear layers.

    hack/env python benchmarks/model_parts.py

One thread a rank, two ranks of this machine, gpt-mini; interleaved rounds, medians. A pipeline is held against
k slots of its slowest stage and one to fill it, (k + 1) f t(m): f the stage's part of the operations, t(m) the time of
one process on a micro-batch, measured in the same rounds. What is above 1 in ``of_slots`` is messages and waiting.
"""

import argparse
import json
import os
import platform
import re
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from local_ranks import local_plan, mpirun, said

from dljob.contract import DatasetRef, ModelRef, Plan
from dltrain.models import InputShape, build
from dltrain.stages import costs, cut

BATCH, STEPS, STAGES = 16, 12, 2


def plan(ranks: int, batch: int, **fields: Any) -> Plan:
    """Every rank computes the whole batch: alone, or its part of the model."""
    return local_plan(
        [batch] * ranks,
        global_batch=batch,
        min_ranks=ranks,
        model=ModelRef(name="gpt-mini"),
        dataset=DatasetRef(name="synthetic-tokens"),
        steps=STEPS,
        **fields,
    )


def step_s(wanted: Plan, folder: Path) -> float:
    """Mean of the steps after the first."""
    output = said(wanted, folder, mpirun(len(wanted.ranks)), OMP_NUM_THREADS="1", DLTRAIN_CPUS_M="1000")
    found = re.findall(rf"step {STEPS}/{STEPS} .* ([\d.]+) ms/step", output)
    if not found:
        raise SystemExit(f"found no last step in what the trainer said:\n{output}")
    return float(found[-1]) / 1e3


def slowest_part() -> float:
    """Of the operations, what the costliest of two stages does."""
    known = costs(build("gpt-mini", InputShape((128,), 256, tokens=True)), torch.zeros(1, 128, dtype=torch.long))
    edges = [*cut(known, STAGES), len(known)]
    parts = [sum(cost.operations for cost in known[a:b]) for a, b in pairwise(edges)]
    return max(parts) / sum(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    micro_batches = (1, 2, 4, 8)
    cases = {f"one process, {BATCH // k} samples": plan(1, BATCH // k) for k in micro_batches}
    cases |= {
        f"pipeline, {k} micro-batches": plan(STAGES, BATCH, parallelism="Pipeline", micro_batches=k)
        for k in micro_batches
    }
    cases["tensor"] = plan(2, BATCH, parallelism="Tensor")
    times: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name, wanted in cases.items():
                times[name].append(step_s(wanted, Path(folder)))
                print(f"round {number}: {name}: {1e3 * times[name][-1]:.1f} ms", flush=True)
    medians = {name: statistics.median(found) for name, found in times.items()}
    part, whole_s = slowest_part(), medians[f"one process, {BATCH} samples"]
    rows = {}
    for k in micro_batches:
        found_s, one_s = medians[f"pipeline, {k} micro-batches"], medians[f"one process, {BATCH // k} samples"]
        slots_s = (k + STAGES - 1) * part * one_s
        rows[f"pipeline, {k} micro-batches"] = {
            "step_s": found_s, "speedup": whole_s / found_s, "of_slots": found_s / slots_s,
        }  # fmt: skip
    rows["tensor"] = {"step_s": medians["tensor"], "speedup": whole_s / medians["tensor"]}
    print(
        json.dumps(
            {
                "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                "one_process_step_s": whole_s,
                "slowest_stage": part,
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
