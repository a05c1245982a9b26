"""Compare the peak main memory of ranks with the plan, for a training script whose model ranks split.

    hack/env python -m benchmarks.training.model_split.script_memory [--parameters 10 25] [--rounds 3] [--json FILE]

The script is ``benchmarks.training.ranks.split_script``, a decoder of 10, 25 or 50 million parameters with AdamW. Its
plan follows from ``spec.model.hints`` alone, with the figures that ``python -m dltrain.profile`` prints. Ranks of this
machine with one thread each train it for three steps. All numbers are those of the rank with the most memory, medians
of the rounds, beside what the rank has when it begins (see ``memory``):

- ``peak``: the largest memory of the run. ``created``: the largest until the rank has its part of the model.
- ``plan``: what the plan adds to the memory of a process.
- ``rank``: the whole memory that the plan has for a rank, with its process, divided by that of the measured rank.

``plan / peak`` must be at least 1 everywhere, and ``rank`` at the median at most 1.1.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.figures import machine
from benchmarks.lib.goals import Figure, table
from benchmarks.lib.local_ranks import local_plan
from benchmarks.training.model_split.memory import MIB, rows_of_ranks
from benchmarks.training.ranks import split_script

from dlcontract import CheckpointRef, DatasetRef, ModelRef, replica_batches
from dljob.cluster import cluster_view
from dljob.perf.resources.memory import PROCESS_NBYTES
from dljob.planner import Decision, Request, plan
from dltrain.launch.preload import preload

BATCH = 32
LARGEST_RATIO = 1.1
SIZES = {10: (384, 6), 25: (576, 6), 50: (832, 6)}
"""Millions of parameters → width and number of blocks."""


@dataclass(frozen=True)
class Case:
    """The script on ``ranks`` ranks. ``replicas``: number of replicas of a model that ranks split."""

    parameters: int
    """Millions."""
    strategy: Literal["Data", "Pipeline", "Tensor"]
    ranks: int
    replicas: int = 1

    @property
    def text(self) -> str:
        parts = self.ranks // self.replicas
        how = {
            "Data": "whole",
            "Pipeline": f"{self.replicas} x {parts} stages",
            "Tensor": f"{self.replicas} x {parts} tensor-parallel",
        }
        return f"{self.parameters} M, {how[self.strategy]}"

    @property
    def micro_batches(self) -> int:
        return 4 if self.strategy == "Pipeline" else 1


def cases(parameters: Iterable[int]) -> Iterable[Case]:
    for millions in parameters:
        yield Case(millions, "Data", 1)
        for ranks, replicas in ((2, 1), (3, 1), (4, 2)):
            yield Case(millions, "Pipeline", ranks, replicas)
            if ranks % 3:  # 8 heads
                yield Case(millions, "Tensor", ranks, replicas)


def hints_of(case: Case) -> dict[str, Any]:
    """Return the planner's figures of the model, as the command for ``spec.model.hints`` prints them."""
    import torch

    from dltrain.profile import Input, profile

    width, blocks = SIZES[case.parameters]
    found = profile(split_script.Net(width, blocks), [Input((split_script.POSITIONS,), torch.int64)])
    return {
        "parameters": found.parameters,
        "flops_per_sample": found.forward_FLOPs + found.backward_FLOPs,
        "activation_nbytes_per_sample": found.activation_nbytes,
        "sample_nbytes": 2 * 8.0 * split_script.POSITIONS,
    }


def predicted_nbytes(case: Case, hints: dict[str, Any]) -> float:
    """Return what the plan adds to the memory of a process for the rank with the most."""
    split: dict[str, Any] = {"strategy": case.strategy}
    if case.strategy != "Data":
        split |= {"replicas": case.replicas}
    if case.strategy == "Pipeline":
        split |= {"stages": case.ranks // case.replicas, "micro_batches": case.micro_batches}
    request = Request(
        job="j", global_batch=BATCH, total_steps=10, checkpoints=False, optimizer="AdamW", nodes_min=case.ranks,
        nodes_max=case.ranks, **split, **hints,
    )  # fmt: skip
    decision = plan(
        request, cluster_view({"nodes": [{"name": "n", "count": case.ranks, "cpu": 1, "memory": "64Gi"}]}), {}
    )
    if not isinstance(decision, Decision):
        raise SystemExit(f"{case.text}: {decision.message}")
    return float(decision.chosen.prediction.memory_nbytes - PROCESS_NBYTES)


def measured_nbytes(case: Case) -> dict[str, int]:
    """Return the memory of the rank with the most by name, see the module's text."""
    split: dict[str, Any] = {}
    shares = list(replica_batches(BATCH, case.ranks))
    if case.strategy != "Data":
        split = {"parallelism": case.strategy, "micro_batches": case.micro_batches, "replicas": case.replicas}
        shares = [share for share in replica_batches(BATCH, case.replicas) for _ in range(case.ranks // case.replicas)]
    width, blocks = SIZES[case.parameters]
    with tempfile.TemporaryDirectory() as name:
        wanted = local_plan(
            shares, global_batch=BATCH, min_ranks=case.ranks, model=ModelRef(command=("split_script",)), epochs=1,
            dataset=DatasetRef(), checkpoint=CheckpointRef(enabled=False, directory=name), **split,
        )  # fmt: skip
        env = {split_script.WIDTH_ENV: str(width), split_script.BLOCKS_ENV: str(blocks)}
        rows = rows_of_ranks(wanted, split_script.main, Path(name), **env)
    found = {name: max(row[name] - row["started"] for row in rows) for name in ("created", "peak")}
    return found | {"process": max(row["anonymous"] for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parameters", type=int, nargs="*", choices=sorted(SIZES), default=sorted(SIZES), help="millions"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    options = parser.parse_args()
    preload()
    measured = dict[Case, list[dict[str, int]]]()
    for case in cases(options.parameters):
        measured[case] = [measured_nbytes(case) for _ in range(options.rounds)]
        print(f"measured {case.text}", file=sys.stderr, flush=True)
    rows, ratios = list[dict[str, Any]](), dict[str, list[tuple[float, float]]]()
    for case, found in measured.items():  # After the forks: torch's threads do not survive one.
        created, peak = (statistics.median(each[name] for each in found) / MIB for name in ("created", "peak"))
        predicted = predicted_nbytes(case, hints_of(case)) / MIB
        ratio = predicted / max(each["peak"] / MIB for each in found)
        whole = max((each["peak"] + each["process"]) / MIB for each in found)
        rank = (predicted + PROCESS_NBYTES / MIB) / whole
        ratios.setdefault(case.strategy, []).append((ratio, rank))
        rows.append(
            asdict(case)
            | {"created_MiB": created, "peak_MiB": peak, "plan_MiB": predicted, "ratio": ratio, "rank": rank}
        )
        print(
            f"{case.text:28} created {created:5.0f} MiB  peak {peak:5.0f}  plan {predicted:5.0f}  plan/peak {ratio:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rounds": options.rounds, "rows": rows}, indent=1))
    figures = []
    for strategy, values in ratios.items():
        least, median = min(ratio for ratio, _ in values), statistics.median(rank for _, rank in values)
        figures.append(Figure(f"{strategy}: least plan / peak of {len(values)}", least, low=1.0))
        figures.append(Figure(f"{strategy}: median of rank", median, high=LARGEST_RATIO))
    print(table(figures))


if __name__ == "__main__":
    main()
