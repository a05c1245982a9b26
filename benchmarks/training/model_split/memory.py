"""Compare the peak main memory of ranks that split a model with the plan.

    hack/env python -m benchmarks.training.model_split.memory [--model resnet18] [--rounds 3]

Ranks of this machine with one thread each train the model for a few steps, without checkpoints and evaluation. All
numbers are those of the rank with the most, medians of the rounds, beside what the rank has when it begins to train:
the interpreter, torch, dltrain, MPI, and what a step of a tiny model imports.

- ``created``: the peak until the rank has its part of the model and the buffer of its gradients.
- ``peak``: the peak of the run.
- ``predicted``: what the plan adds to the memory of a process. It includes a margin of a quarter (``GROWTH_MARGIN``),
  because a pod that exceeds its limit is killed. ``expected`` is without the margin.
- ``tensors``: the plan's sum of the sizes of tensors, without the coefficients of kernels on CPUs.
- ``ratio``, ``of_expected``, ``of_tensors``: the peak divided by ``predicted``, ``expected`` and ``tensors``.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.local_ranks import local_plan, mpirun, run_captured

from dlcontract import DatasetRef, ModelRef, OptimizerRef, replica_batches
from dljob.cluster import cluster_view
from dljob.perf.resources.memory import GPU_CONTEXT_NBYTES, GROWTH_MARGIN, MARGIN, PROCESS_NBYTES
from dljob.planner import Decision, Request, plan

RANK = ("-m", "benchmarks.training.ranks.model_part_memory")
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A way to split the model over ``ranks`` ranks. ``replicas``: number of its replicas."""

    strategy: Literal["Data", "Pipeline"]
    ranks: int
    replicas: int = 1
    micro_batches: int = 4

    @property
    def text(self) -> str:
        if self.strategy == "Data":
            return "one process"
        return f"{self.replicas} x {self.ranks // self.replicas} stages, {self.micro_batches} micro-batches"


CASES = (Case("Pipeline", 2), Case("Pipeline", 4), Case("Pipeline", 4, 2), Case("Data", 1))


def predicted_nbytes(case: Case, model: str, batch: int) -> tuple[float, float]:
    """Return what the plan adds to the memory of a process for the rank with the most, and its tensors alone.

    A plan for GPUs has no coefficients of kernels on CPUs, so its memory without context and margin is that of tensors.
    """
    split: dict[str, Any] = {"strategy": case.strategy}
    if case.strategy == "Pipeline":
        split |= {"stages": case.ranks // case.replicas, "micro_batches": case.micro_batches}
        split |= {"replicas": case.replicas}
    request = Request(
        job="j", global_batch=batch, total_steps=10, model=model, dataset="synthetic-images", checkpoints=False,
        nodes_min=case.ranks, nodes_max=case.ranks, **split,
    )  # fmt: skip
    found = []
    for device in ({}, {"device": "NVIDIA-A100-SXM4-40GB", "devices": 1}):
        nodes = {"name": "n", "count": case.ranks, "cpu": 2, "memory": "64Gi", **device}
        decision = plan(request, cluster_view({"nodes": [nodes]}), {})
        if not isinstance(decision, Decision):
            raise SystemExit(f"{case.text}: {decision.message}")
        found.append(decision.chosen.prediction.memory_nbytes)
    return float(found[0] - PROCESS_NBYTES), (found[1] - GPU_CONTEXT_NBYTES) / MARGIN


def measured_nbytes(case: Case, model: str, batch: int, steps: int, folder: Path) -> dict[str, int]:
    """Return the memory of the rank with the most by name, see the module's text."""
    parts = case.ranks // case.replicas
    shares = [share for share in replica_batches(batch, case.replicas) for _ in range(parts)]
    split: dict[str, Any] = {}
    if case.strategy == "Pipeline":
        split = {"parallelism": "Pipeline", "micro_batches": case.micro_batches, "replicas": case.replicas}
    wanted = local_plan(
        shares, global_batch=batch, min_ranks=case.ranks, model=ModelRef(name=model), steps=steps,
        dataset=DatasetRef(name="synthetic-images"), optimizer=OptimizerRef(), **split,
    )  # fmt: skip
    launcher = mpirun(case.ranks) if case.ranks > 1 else ()
    output = run_captured(wanted, folder, launcher, RANK, OMP_NUM_THREADS="1", DLTRAIN_CPUS_M="1000")
    rows = [json.loads(row) for row in re.findall(r"memory ({.*?})", output)]
    if len(rows) != case.ranks:
        raise SystemExit(f"found {len(rows)} of {case.ranks} ranks in the trainer's output:\n{output}")
    return {
        "created": max(row["created"] - row["started"] for row in rows),
        "peak": max(row["peak"] - row["started"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=("resnet18", "resnet50"), default="resnet18")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    found: dict[Case, list[dict[str, int]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for case in CASES:
                found[case].append(measured_nbytes(case, options.model, options.batch, options.steps, Path(folder)))
                row = {name: round(nbytes / MIB) for name, nbytes in found[case][-1].items()}
                print(f"round {number}: {case.text}: {row} MiB", flush=True)
    rows = {}
    for case, measured in found.items():
        predicted, tensors = predicted_nbytes(case, options.model, options.batch)
        created, peak = (statistics.median(each[name] for each in measured) for name in ("created", "peak"))
        expected = predicted / GROWTH_MARGIN
        rows[case.text] = {
            "created_MiB": created / MIB, "peak_MiB": peak / MIB, "predicted_MiB": predicted / MIB,
            "expected_MiB": expected / MIB, "tensors_MiB": tensors / MIB, "ratio": peak / predicted,
            "of_expected": peak / expected, "of_tensors": peak / tensors,
        }  # fmt: skip
    print(json.dumps({"model": options.model, "batch": options.batch, "cores": os.cpu_count(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
