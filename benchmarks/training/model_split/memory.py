"""Compare the peak main memory of ranks with the plan, for built-in models that ranks split, and for whole ones.

    hack/env python -m benchmarks.training.model_split.memory [--model resnet18 …] [--strategy Tensor …] [--rounds 3]
        [--json] [--rows FILE]

Ranks of this machine with one thread each train the model for a few steps and evaluate it. All numbers are those of the
rank with the most memory, medians of the rounds, beside what the rank has when it begins to train: the interpreter,
torch, dltrain, MPI, and what a step of a tiny model imports.

- ``peak``: the largest memory of the run. ``created``: the largest until the rank has its part of the model and the
  buffer of its gradients.
- ``plan``: what the plan adds to the memory of a process (``PROCESS_NBYTES``), with the margin for which pods are not
  killed when they exceed it.
- ``tensors``: the plan's sum of the sizes of tensors, without anything else.

The summary has plan / peak by strategy. It must be at least 1 everywhere, and at the median at most 1.3.
``--rows`` adds the measurements to a file, and does not measure again what the file has.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.forked_ranks import run_forked
from benchmarks.lib.goals import Figure, table
from benchmarks.lib.local_ranks import local_plan, mpirun
from benchmarks.training.ranks import model_part_memory

from dlcontract import CheckpointRef, DatasetRef, ModelRef, OptimizerRef, Plan, replica_batches
from dljob.cluster import cluster_view
from dljob.perf.resources.memory import GPU_CONTEXT_NBYTES, GPU_WORKSPACE_NBYTES, MARGIN, PROCESS_NBYTES
from dljob.perf.workload.models import MODELS
from dljob.planner import Decision, Request, plan
from dltrain.launch.preload import preload
from dltrain.protocol.rank_messages import PLAN_ENV

MIB = 2**20
STEPS = 3
LARGEST_RATIO = 1.3
"""Maximum of the median of plan / peak."""


BATCHES = {"resnet18": 16, "gpt-mini": 32, "resnet50": 8, "digits-cnn": 64, "lenet": 64, "mlp": 512}
"""Model → global batch size of its cases."""
PAIRED = ("mlp", "lenet", "gpt-mini")
"""Models that tensor parallelism can split."""


@dataclass(frozen=True)
class Case:
    """A way to train a model on ``ranks`` ranks. ``replicas``: number of replicas of a model that ranks split."""

    model: str
    batch: int
    strategy: Literal["Data", "Pipeline", "Tensor"]
    ranks: int
    replicas: int = 1
    micro_batches: int = 4
    optimizer: Literal["SGD", "AdamW"] = "SGD"
    checkpoints: bool = False

    @property
    def parts(self) -> int:
        return self.ranks // self.replicas

    @property
    def text(self) -> str:
        notes = [f"{self.model} {self.batch}"]
        if self.strategy == "Data":
            notes.append(f"{self.ranks} whole")
        elif self.strategy == "Pipeline":
            notes.append(f"{self.replicas} x {self.parts} stages, {self.micro_batches} micro-batches")
        else:
            notes.append(f"{self.replicas} x {self.parts} tensor-parallel")
        notes += ["AdamW"] * (self.optimizer == "AdamW") + ["checkpoints"] * self.checkpoints
        return ", ".join(notes)


def cases() -> Iterable[Case]:
    """Yield the cases, those of each model together."""
    for model, batch in BATCHES.items():
        yield Case(model, batch, "Data", 1)
        for ranks, replicas in ((2, 1), (4, 1), (4, 2)):
            if model != "mlp" or ranks == 2 * replicas:
                yield Case(model, batch, "Pipeline", ranks, replicas)
            if model in PAIRED:
                yield Case(model, batch, "Tensor", ranks, replicas)
    yield Case("resnet18", 64, "Data", 1)
    yield Case("resnet18", 64, "Pipeline", 2)
    yield Case("resnet18", 64, "Pipeline", 4, micro_batches=16)
    yield Case("resnet18", 16, "Pipeline", 2, micro_batches=1)
    yield Case("gpt-mini", 128, "Pipeline", 2)
    yield Case("gpt-mini", 128, "Tensor", 2)
    yield Case("resnet18", 16, "Data", 2)
    yield Case("resnet50", 8, "Pipeline", 2, optimizer="AdamW")
    yield Case("resnet50", 8, "Pipeline", 2, optimizer="AdamW", checkpoints=True)
    yield Case("resnet50", 8, "Data", 1, optimizer="AdamW", checkpoints=True)


def predicted_nbytes(case: Case) -> tuple[float, float]:
    """Return what the plan adds to the memory of a process for the rank with the most, and its tensors alone.

    A plan for GPUs has no coefficients of kernels on CPUs, so its memory without context and margin is that of tensors.
    """
    split: dict[str, Any] = {"strategy": case.strategy}
    if case.strategy != "Data":
        split |= {"replicas": case.replicas}
    if case.strategy == "Pipeline":
        split |= {"stages": case.parts, "micro_batches": case.micro_batches}
    request = Request(
        job="j", global_batch=case.batch, total_steps=10, model=case.model, checkpoints=case.checkpoints,
        optimizer=case.optimizer, nodes_min=case.ranks, nodes_max=case.ranks, reuses_blocks=True, **split,
    )  # fmt: skip
    found = []
    for device in ({}, {"device": "NVIDIA-A100-SXM4-40GB", "devices": 1}):
        nodes = {"name": "n", "count": case.ranks, "cpu": 1, "memory": "64Gi", **device}
        decision = plan(request, cluster_view({"nodes": [nodes]}), {})
        if not isinstance(decision, Decision):
            raise SystemExit(f"{case.text}: {decision.message}")
        found.append(decision.chosen.prediction.memory_nbytes)
    return float(found[0] - PROCESS_NBYTES), (found[1] - GPU_CONTEXT_NBYTES - GPU_WORKSPACE_NBYTES) / MARGIN


def rows_of_ranks(wanted: Plan, rank: Callable[[], None], folder: Path, **env: str) -> list[dict[str, int]]:
    """Run ``rank`` as each rank of the plan, with one CPU. Return the memory that each rank prints, by name.

    ``folder``: folder for the plan and the output of the ranks. ``env``: further variables of the ranks.
    """
    plan_file, file, ranks = folder / "plan.json", folder / "output", len(wanted.ranks)
    plan_file.write_text(wanted.to_json(), encoding="utf-8")
    launcher = mpirun(ranks) if ranks > 1 else ()
    run_forked(ranks, launcher, rank, file, **{PLAN_ENV: str(plan_file)}, DLTRAIN_CPUS_M="1000", **env)
    output = file.read_text(encoding="utf-8", errors="replace")
    rows = [json.loads(row) for row in re.findall(r"memory ({.*?})", output)]
    if len(rows) != ranks:
        raise SystemExit(f"found {len(rows)} of {ranks} ranks in the trainer's output:\n{output}")
    return rows


def measured_nbytes(case: Case, steps: int = STEPS) -> dict[str, int]:
    """Return the memory of the rank with the most by name, see the module's text, and the time of ``steps`` steps.

    ``cpu_us``: the processor time of all ranks in microseconds, from the first step to the end of the evaluation.
    """
    split: dict[str, Any] = {}
    if case.strategy != "Data":
        micro_batches = case.micro_batches if case.strategy == "Pipeline" else 1
        split = {"parallelism": case.strategy, "micro_batches": micro_batches, "replicas": case.replicas}
        shares = [share for share in replica_batches(case.batch, case.replicas) for _ in range(case.parts)]
    else:
        shares = list(replica_batches(case.batch, case.ranks))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = local_plan(
            shares, global_batch=case.batch, min_ranks=case.ranks, model=ModelRef(name=case.model), steps=steps,
            dataset=DatasetRef(name=MODELS[case.model][1]),
            optimizer=OptimizerRef(name=case.optimizer, learning_rate=1e-3),
            checkpoint=CheckpointRef(enabled=case.checkpoints, directory=str(folder)), **split,
        )  # fmt: skip
        rows = rows_of_ranks(wanted, model_part_memory.main, folder)
    found = {name: max(row[name] - row["started"] for row in rows) for name in ("created", "peak")}
    found["cpu_us"] = sum(row["cpu_us"] for row in rows)
    return found | {name: max(row[name] for row in rows) for name in ("anonymous", "shared")}


def collected(wanted: list[Case], rounds: int, file: Path | None) -> dict[Case, list[dict[str, int]]]:
    """Measure each case ``rounds`` times. ``file``: measurements of earlier runs, which count; new ones are added."""
    found: dict[Case, list[dict[str, int]]] = {case: [] for case in wanted}
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if (case := Case(**row["case"])) in found:
                found[case].append(row["measured"])
    for number in range(rounds):
        for case, rows in found.items():
            if len(rows) > number:
                continue
            rows.append(measured_nbytes(case))
            print(f"round {number}: {case.text}: {_mebibytes(rows[-1])} MiB", flush=True)
            if file is not None:
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({"case": asdict(case), "measured": rows[-1]}) + "\n")
    return found


def _mebibytes(row: dict[str, int]) -> dict[str, int]:
    return {name: round(nbytes / MIB) for name, nbytes in row.items() if name != "cpu_us"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", nargs="*", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--strategy", nargs="*", choices=("Data", "Pipeline", "Tensor"))
    parser.add_argument("--rows", type=Path, help="file of measurements to create or extend, one JSON object per line")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    preload()
    strategies = options.strategy or ("Data", "Pipeline", "Tensor")
    wanted = [case for case in cases() if case.model in options.model and case.strategy in strategies]
    rows, ratios = list[dict[str, Any]](), dict[str, list[float]]()
    for case, measured in collected(wanted, options.rounds, options.rows).items():
        predicted, tensors = predicted_nbytes(case)
        created, peak = (statistics.median(each[name] for each in measured) for name in ("created", "peak"))
        ratio = predicted / max(each["peak"] for each in measured)
        ratios.setdefault(case.strategy, []).append(ratio)
        rows.append(
            {
                "case": case.text, "created_MiB": round(created / MIB), "peak_MiB": round(peak / MIB),
                "tensors_MiB": round(tensors / MIB), "plan_MiB": round(predicted / MIB), "plan/peak": round(ratio, 2),
            }
        )  # fmt: skip
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rounds": options.rounds, "rows": rows}, indent=1))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" if name != "case" else f"{value:48}" for name, value in row.items()))
    figures = []
    for strategy, values in ratios.items():
        figures.append(Figure(f"{strategy}: least plan / peak of {len(values)}", min(values), low=1.0))
        figures.append(Figure(f"{strategy}: median plan / peak", statistics.median(values), high=LARGEST_RATIO))
    print(table(figures))


if __name__ == "__main__":
    main()
