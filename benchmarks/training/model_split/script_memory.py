"""Compare the peak main memory of ranks with the plan, for a training script whose model ranks split.

    hack/env python -m benchmarks.training.model_split.script_memory [--net decoder-10 …] [--rounds 3] [--checkpoints]
        [--sharded] [--json FILE]

The script is ``benchmarks.training.ranks.split_script``: networks of 10 to 50 million parameters with AdamW, and LoRA
on a frozen decoder of 75 million parameters, which the script loads from a file. Its plan follows from
``spec.model.hints`` alone, with the figures that ``python -m dltrain.profile`` prints. Ranks of this machine with one
thread each train it for three steps. All numbers are those of the rank with the most memory, medians of the rounds,
beside what the rank has when it begins (see ``memory``). ``--sharded`` measures strategy Sharded instead, in float32
and bfloat16, with and without activation checkpointing:

- ``peak``: the largest memory of the run. ``created``: the largest until the rank has its part of the model.
- ``plan``: what the plan adds to the memory of a process. ``first``: with the three figures that a user may write by
  hand: parameters, operations and bytes of activations.
- ``second``: what the next plan of the script adds, which knows the measured memory of a rank.
- ``rank``: the whole memory that the plan has for a rank, with its process, divided by that of the measured rank.

``plan / peak`` must be at least 1 everywhere, and ``rank`` at the median at most 1.1, with strategy Sharded 1.3. Plans
do not use the measured memory of runs with strategy Sharded, so that ``second`` says nothing there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.figures import machine
from benchmarks.lib.goals import Figure, table
from benchmarks.lib.local_ranks import local_plan
from benchmarks.training.model_split.memory import MIB, rows_of_ranks
from benchmarks.training.ranks import split_script

from dlcontract import CheckpointRef, DatasetRef, ModelRef, Precision, replica_batches
from dljob.calibrate.learned import Learned
from dljob.calibrate.memory import MemoryPoint, Split
from dljob.cluster import cluster_view
from dljob.perf.resources.memory import AGENT_NBYTES, PROCESS_NBYTES, SHM_PER_RANK_NBYTES
from dljob.planner import Decision, Request, plan
from dltrain.launch.preload import preload

BATCH = 32
PRECISIONS: tuple[Precision, ...] = ("FP32", "BF16")
LARGEST_RATIO = {"Sharded": 1.3}
"""Goal of ``rank`` by strategy; ``USUAL_RATIO`` for others."""
USUAL_RATIO = 1.1
NETS = {
    "decoder-10": ("decoder", 384, 6),
    "decoder-25": ("decoder", 576, 6),
    "decoder-50": ("decoder", 832, 6),
    "mixer-25": ("mixer", 512, 12),
    "lora-75": ("lora", 1024, 6),
    "recurrent-11": ("recurrent", 576, 4),
    "convolutional-11": ("convolutional", 256, 9),
}
"""Name with the millions of parameters → kind of network, width and number of blocks."""


@dataclass(frozen=True)
class Case:
    """The script on ``ranks`` ranks. ``replicas``: number of replicas of a model that ranks split."""

    net: str
    """A name of ``NETS``."""
    strategy: Literal["Data", "Pipeline", "Tensor", "Sharded"]
    ranks: int
    replicas: int = 1
    checkpoints: bool = False
    """True to write a checkpoint after each step, as far as the one before is written."""
    precision: Precision = "FP32"
    recomputes: bool = False

    @property
    def text(self) -> str:
        parts = self.ranks // self.replicas
        how = {
            "Data": "whole",
            "Pipeline": f"{self.replicas} x {parts} stages",
            "Tensor": f"{self.replicas} x {parts} tensor-parallel",
            "Sharded": f"sharded over {self.ranks}",
        }
        computed = f"{f', {self.precision}' * (self.precision != 'FP32')}{', recomputes' * self.recomputes}"
        return f"{self.net}, {how[self.strategy]}{', checkpoints' * self.checkpoints}{computed}"

    @property
    def micro_batches(self) -> int:
        return 4 if self.strategy == "Pipeline" else 1


def cases(nets: Iterable[str], checkpoints: bool, sharded: bool) -> Iterable[Case]:
    for net in nets:
        if sharded:
            for ranks, precision, recomputes in product((2, 3), PRECISIONS, (False, True)):
                if not recomputes or NETS[net][0] != "convolutional":  # it has no list of blocks alone
                    yield Case(net, "Sharded", ranks, 1, checkpoints, precision, recomputes)
            continue
        if checkpoints:
            yield Case(net, "Data", 1, checkpoints=True)
            continue
        yield Case(net, "Data", 1)
        for ranks, replicas in ((2, 1), (3, 1), (4, 2)):
            yield Case(net, "Pipeline", ranks, replicas)
            if ranks % 3 and NETS[net][0] in ("decoder", "lora", "mixer"):  # 8 heads
                yield Case(net, "Tensor", ranks, replicas)


@cache
def hints_of(net: str) -> dict[str, Any]:
    """Return the planner's figures of the model, as the command for ``spec.model.hints`` prints them."""
    import yaml

    from dljob.api.spec.model import ModelHints
    from dljob.job.plan.request import stated_pairs
    from dltrain.models.pass_costs import Input
    from dltrain.profile import profile

    name, width, blocks = NETS[net]
    kind = split_script.KINDS[name]
    made = kind.net(width, blocks)
    named = [name for name, _ in made.named_children() if name == "blocks"]
    text = profile(made, [Input(kind.shape, kind.dtype)], named).hints()
    hints = ModelHints.model_validate(yaml.safe_load(text)["model"]["hints"])
    x, y = kind.data(1, 1)
    return {
        "parameters": hints.parameters,
        "flops_per_sample": hints.flops_per_sample,
        "activation_nbytes_per_sample": hints.activation_bytes_per_sample,
        "dense_output_nbytes": hints.dense_output_bytes_per_sample,
        "largest_activation_nbytes": hints.largest_activation_bytes_per_sample,
        "largest_parameter_nbytes": hints.largest_parameter_bytes,
        "frozen_nbytes": hints.frozen_bytes or 0,
        "checkpointed_nbytes_per_sample": hints.checkpointed_activation_bytes_per_sample,
        "largest_unit": hints.largest_unit_parameters,
        "pairs": stated_pairs(hints.pairs) if hints.pairs else None,
        "sample_nbytes": x.nbytes + y.nbytes,
    }


def predicted_nbytes(case: Case, hints: dict[str, Any], measured_nbytes: int | None = None) -> float:
    """Return what the plan adds to the memory of a process for the rank with the most.

    ``measured_nbytes``: memory of this rank in a complete run; None: the script has not run.
    """
    split: dict[str, Any] = {"strategy": case.strategy}
    if case.strategy in ("Pipeline", "Tensor"):
        split |= {"replicas": case.replicas}
    if case.strategy == "Pipeline":
        split |= {"stages": case.ranks // case.replicas, "micro_batches": case.micro_batches}
    request = Request(
        job="j", global_batch=BATCH, total_steps=10, checkpoints=case.checkpoints, optimizer="AdamW",
        nodes_min=case.ranks, nodes_max=case.ranks, profile="program", reuses_blocks=True, precision=case.precision,
        recomputation="Always" if case.recomputes else "Never", **split, **hints,
    )  # fmt: skip
    learned = {}
    if measured_nbytes is not None:
        how = Split(case.ranks // case.replicas, case.replicas, case.micro_batches, case.checkpoints)
        batch = -(-(BATCH // case.replicas) // case.micro_batches)
        peak = AGENT_NBYTES + measured_nbytes
        point = MemoryPoint(
            1, batch, case.strategy, peak, 2 * peak, split=how if case.strategy in ("Pipeline", "Tensor") else None
        )
        learned = {("program", "cpu"): Learned(memory=(point,))}
    view = cluster_view({"nodes": [{"name": "n", "count": case.ranks, "cpu": 1, "memory": "64Gi"}]})
    decision = plan(request, view, learned)
    if not isinstance(decision, Decision):
        raise SystemExit(f"{case.text}: {decision.message}")
    pod = decision.chosen.prediction.host_memory_nbytes
    beside = AGENT_NBYTES + (SHM_PER_RANK_NBYTES if measured_nbytes is None else 0)
    return float(pod - beside - PROCESS_NBYTES)


def measured_nbytes(case: Case) -> dict[str, int]:
    """Return the memory of the rank with the most by name, see the module's text."""
    split: dict[str, Any] = {}
    shares = list(replica_batches(BATCH, case.ranks))
    if case.strategy == "Sharded":
        split = {"parallelism": "Sharded", "collective": "Torch"}
    elif case.strategy != "Data":
        split = {"parallelism": case.strategy, "micro_batches": case.micro_batches, "replicas": case.replicas}
        shares = [share for share in replica_batches(BATCH, case.replicas) for _ in range(case.ranks // case.replicas)]
    kind, width, blocks = NETS[case.net]
    with tempfile.TemporaryDirectory() as name:
        checkpoint = CheckpointRef(enabled=case.checkpoints, directory=name, interval_s=0.001)
        wanted = local_plan(
            shares, global_batch=BATCH, min_ranks=case.ranks, model=ModelRef(command=("split_script",)), epochs=1,
            dataset=DatasetRef(), checkpoint=checkpoint, precision=case.precision,
            activation_checkpointing=case.recomputes, **split,
        )  # fmt: skip
        env = {split_script.KIND_ENV: kind, split_script.WIDTH_ENV: str(width), split_script.BLOCKS_ENV: str(blocks)}
        if kind == "lora":
            base = str(Path(name) / "base.safetensors")
            writing = [sys.executable, "-m", "benchmarks.training.ranks.split_script", base]
            subprocess.run(writing, check=True, env={**os.environ, **env})
            env[split_script.BASE_ENV] = base
        rows = rows_of_ranks(wanted, split_script.main, Path(name), **env)
    found = {name: max(row[name] - row["started"] for row in rows) for name in ("created", "peak")}
    return found | {"process": max(row["anonymous"] for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", nargs="*", choices=sorted(NETS), default=list(NETS))
    parser.add_argument("--checkpoints", action="store_true", help="whole models that write checkpoints")
    parser.add_argument("--sharded", action="store_true", help="strategy Sharded, in both precisions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    options = parser.parse_args()
    preload()
    measured = dict[Case, list[dict[str, int]]]()
    for case in cases(options.net, options.checkpoints, options.sharded):
        measured[case] = [measured_nbytes(case) for _ in range(options.rounds)]
        print(f"measured {case.text}", file=sys.stderr, flush=True)
    rows, ratios = list[dict[str, Any]](), dict[str, list[tuple[float, float]]]()
    for case, found in measured.items():  # After the forks: torch's threads do not survive one.
        created, peak = (statistics.median(each[name] for each in found) / MIB for name in ("created", "peak"))
        hints = hints_of(case.net)
        known = hints | {"dense_output_nbytes": None, "pairs": None, "largest_unit": None}
        most = max(each["peak"] + each["process"] for each in found)
        predicted, first, second = (
            predicted_nbytes(case, *how) / MIB for how in ((hints,), (known,), (hints, most))
        )  # fmt: skip
        ratio = predicted / max(each["peak"] / MIB for each in found)
        rank, again = (((each + PROCESS_NBYTES / MIB) * MIB / most) for each in (predicted, second))
        ratios.setdefault(case.strategy, []).append((ratio, rank))
        rows.append(
            asdict(case)
            | {"created_MiB": created, "peak_MiB": peak, "plan_MiB": predicted, "first_MiB": first}
            | {"second_MiB": second, "ratio": ratio, "rank": rank, "rank_second": again}
        )
        print(
            f"{case.text:44} created {created:5.0f} MiB  peak {peak:5.0f}  plan {predicted:5.0f} first {first:5.0f} "
            f"second {second:5.0f}  plan/peak {ratio:.2f}  first/peak {first / peak:.2f}  rank {rank:.2f} {again:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rounds": options.rounds, "rows": rows}, indent=1))
    figures = []
    for strategy, values in ratios.items():
        least, median = min(ratio for ratio, _ in values), statistics.median(rank for _, rank in values)
        figures.append(Figure(f"{strategy}: least plan / peak of {len(values)}", least, low=1.0))
        figures.append(Figure(f"{strategy}: median of rank", median, high=LARGEST_RATIO.get(strategy, USUAL_RATIO)))
    print(table(figures))


if __name__ == "__main__":
    main()
