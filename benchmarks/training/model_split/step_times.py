"""Compare the step time of pipeline and tensor parallelism on two ranks with data parallelism and with one process.

    hack/env python -m benchmarks.training.model_split.step_times [--model resnet18] [--batch 32] [--rounds 2]

Two ranks of this machine with one thread each run in interleaved rounds; times are medians. The bound of a pipeline is
k slots of its slowest stage and one to fill it, (k + 1) f t(m), where f is the stage's part of the operations and t(m)
the time of one process on a micro-batch in the same rounds. ``of_slots`` is the step time over this bound; the excess
over 1 is messages and waiting. ``of_data`` is the step time over that of data-parallel ranks, the ratio that a planner
with strategy Auto has to predict.
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
from benchmarks.lib.local_ranks import local_plan, mpirun, run_captured

from dlcontract import DatasetRef, ModelRef, Plan
from dltrain.models import InputShape, build
from dltrain.parallel.model_split.pipeline_stages import costs, cut

STAGES = 2
MODELS = {
    "gpt-mini": ("synthetic-tokens", InputShape((128,), 256, tokens=True)),
    "resnet18": ("synthetic-images", InputShape((3, 32, 32), 10)),
}


def plan(model: str, shares: list[int], batch: int, steps: int, **fields: Any) -> Plan:
    """Return a plan with these local batch sizes. With model parallelism each of them is the whole batch."""
    return local_plan(
        shares,
        global_batch=batch,
        min_ranks=len(shares),
        model=ModelRef(name=model),
        dataset=DatasetRef(name=MODELS[model][0]),
        steps=steps,
        **fields,
    )


def step_s(wanted: Plan, folder: Path) -> float:
    """Run the plan and return the mean step time after the first step."""
    output = run_captured(wanted, folder, mpirun(len(wanted.ranks)), OMP_NUM_THREADS="1", DLTRAIN_CPUS_M="1000")
    found = re.findall(rf"step {wanted.steps}/{wanted.steps} .* ([\d.]+) ms/step", output)
    if not found:
        raise SystemExit(f"found no last step in the trainer's output:\n{output}")
    return float(found[-1]) / 1e3


def slowest_part(model: str) -> float:
    """Return the fraction of the operations that the larger of two stages computes."""
    data = MODELS[model][1]
    layer_costs = costs(
        build(model, data), torch.zeros(1, *data.shape, dtype=torch.long if data.tokens else torch.float)
    )
    edges = [*cut(layer_costs, STAGES), len(layer_costs)]
    parts = [sum(cost.operations for cost in layer_costs[a:b]) for a, b in pairwise(edges)]
    return max(parts) / sum(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="gpt-mini")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--most", type=int, default=8, help="maximum number of micro-batches")
    options = parser.parse_args()
    name, batch, steps = options.model, options.batch, options.steps
    micro_batches = tuple(k for k in (1, 2, 4, 8, 16) if k <= options.most)
    cases = {f"one process, {batch // k} samples": plan(name, [batch // k], batch // k, steps) for k in micro_batches}
    cases["data"] = plan(name, [batch // 2] * 2, batch, steps)
    cases |= {
        f"pipeline, {k} micro-batches": plan(
            name, [batch] * STAGES, batch, steps, parallelism="Pipeline", micro_batches=k
        )
        for k in micro_batches
    }
    if name == "gpt-mini":
        cases["tensor"] = plan(name, [batch] * 2, batch, steps, parallelism="Tensor")
    times: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for case, wanted in cases.items():
                times[case].append(step_s(wanted, Path(folder)))
                print(f"round {number}: {case}: {1e3 * times[case][-1]:.1f} ms", flush=True)
    medians = {case: statistics.median(found) for case, found in times.items()}
    part, whole_s, data_s = slowest_part(name), medians[f"one process, {batch} samples"], medians["data"]
    rows = {"data": {"step_s": data_s, "speedup": whole_s / data_s}}
    for k in micro_batches:
        found_s, one_s = medians[f"pipeline, {k} micro-batches"], medians[f"one process, {batch // k} samples"]
        slots_s = (k + STAGES - 1) * part * one_s
        rows[f"pipeline, {k} micro-batches"] = {
            "step_s": found_s, "speedup": whole_s / found_s, "of_slots": found_s / slots_s,
            "of_data": found_s / data_s,
        }  # fmt: skip
    if "tensor" in medians:
        found_s = medians["tensor"]
        rows["tensor"] = {"step_s": found_s, "speedup": whole_s / found_s, "of_data": found_s / data_s}
    print(
        json.dumps(
            {
                "model": name,
                "batch": batch,
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
