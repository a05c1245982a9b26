"""Compare predictions for one GPU with measured training: time of a step, GPU memory and power.

    python -m benchmarks.gpu.predictions [--rounds 1] [--json FILE] [--model resnet50] [--device cpu]

Each case (model, samples, precision) runs twice on one rank, with the built-in trainer. The first run is predicted by
the data sheet of the GPU, without any measurement. The second is predicted from the profile that the operator would
keep of the first. Ratios are predicted / measured. Times are those of a step, and of its computing. Memory is the
largest that PyTorch's allocator used, plus what CUDA itself takes; a prediction must not be below it. (The allocator
keeps freed memory until it needs it, so it reserves more where there is more.) Power is that of the GPU alone, measured
by NVML's counter during the steps. ``--device cpu`` runs the smallest cases without a GPU, which tests this program.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.device import add_option, chosen
from benchmarks.gpu.rank import FOUND
from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import mpirun, run_with_messages
from benchmarks.perfmodel.prediction import RunMessages, report, steady_s

from dlcontract import CPUS_VARIABLE, Precision
from dljob.api import DLJobSpec, DLProfileStatus
from dljob.calibrate.learned import measured_key
from dljob.cluster import ClusterView, cluster_view
from dljob.cluster.catalogue import gpu
from dljob.job.identity import profile_key
from dljob.job.plan.request import planner_request
from dljob.job.plan.trainer import trainer_plan
from dljob.job.profiles import learned, updated_profile
from dljob.perf.resources.energy import host_watts, overhead
from dljob.planner import Decision, Learned, plan

CASES: tuple[tuple[str, str, int, int, tuple[Precision, ...]], ...] = (
    ("mlp", "digits", 256, 2000, ("FP32",)),
    ("digits-cnn", "digits", 256, 1000, ("FP32",)),
    ("lenet", "synthetic-images", 256, 400, ("FP32",)),
    ("resnet18", "synthetic-images", 32, 200, ("FP32",)),
    ("resnet18", "synthetic-images", 256, 150, ("FP32", "BF16")),
    ("resnet50", "synthetic-images", 32, 150, ("FP32", "BF16")),
    ("resnet50", "synthetic-images", 256, 100, ("FP32", "BF16")),
    ("gpt-mini", "synthetic-tokens", 8, 200, ("FP32", "BF16")),
    ("gpt-mini", "synthetic-tokens", 64, 100, ("FP32", "BF16")),
)
"""Model, dataset, samples of a step, steps, and precisions."""
ON_CPU = ("mlp", "digits-cnn")
TIMEOUT_S = 240
MIB = 2**20


@dataclass(frozen=True)
class Case:
    model: str
    dataset: str
    batch: int
    steps: int
    precision: Precision

    @property
    def name(self) -> str:
        return f"{self.model}, {self.batch}, {self.precision}"

    def spec(self, device: str) -> DLJobSpec:
        return DLJobSpec.model_validate(
            {
                "model": {"name": self.model},
                "dataset": {"name": self.dataset},
                "globalBatchSize": self.batch,
                "steps": self.steps,
                "precision": self.precision,
                "devices": [device],
                "nodes": {"min": 1, "max": 1},
                "checkpoint": {"enabled": False},
            }
        )

    def decided(self, view: ClusterView, device: str, profile: DLProfileStatus) -> Decision:
        spec = self.spec(device)
        known: dict[tuple[str, str], Learned] = {}
        if profile.observed_jobs:
            known[measured_key(profile_key(spec), self.precision), device] = learned(profile)
        found = plan(planner_request("benchmark", spec), view, known)
        if not isinstance(found, Decision):
            raise SystemExit(f"{self.name}: {found.message}")
        return found

    def run(self, decision: Decision, device: str) -> tuple[dict[str, Any], RunMessages, Any]:
        """Train, and return what was measured, the messages of the rank, and the trainer's plan."""
        todo = trainer_plan("benchmark", "default", "0", self.spec(device), decision, 1, 1, "here", "cluster.local")
        messages = RunMessages()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "found.json")
            command = [*mpirun(1), sys.executable, "-m", "benchmarks.gpu.rank"]
            env = {CPUS_VARIABLE: str(1000 * len(os.sched_getaffinity(0))), FOUND: str(file)}
            run_with_messages(todo, command, messages.add, TIMEOUT_S, env, subprocess.DEVNULL)
            memory = json.loads(file.read_text(encoding="utf-8"))
        measure = messages.measures[0]
        found = {
            "step_s": steady_s(messages),
            "compute_s": measure.compute_s,
            "data_s": measure.data_s,
            "power_W": measure.power_W,
            **memory,
        }
        return found, messages, todo


def rows(case: Case, view: ClusterView, device: str) -> list[dict[str, Any]]:
    """Run a case twice, and return what was predicted and measured."""
    found, profile = [], DLProfileStatus()
    key = measured_key(profile_key(case.spec(device)), case.precision)
    sheet = gpu(device)
    for number in ("first", "second"):
        decision = case.decided(view, device, profile)
        prediction = decision.chosen.prediction
        measured, messages, todo = case.run(decision, device)
        power_W = None
        if prediction.energy_J and sheet is not None:  # without the host and the data centre
            power_W = prediction.energy_J / prediction.total_s / overhead(sheet) - host_watts(sheet)
        predicted = {
            "step_s": prediction.step_s,
            "compute_s": prediction.compute_s,
            "data_s": prediction.data_s,
            "p90_s": prediction.step_p90_s,
            "memory_nbytes": prediction.memory_nbytes,
            "power_W": power_W,
        }
        found.append({"case": case.name, "run": number, "predicted": predicted, "measured": measured})
        profile = updated_profile(profile, key, device, report(todo, messages), datetime.now(UTC))
    return found


def ratio(row: dict[str, Any], key: str) -> float | None:
    predicted, measured = row["predicted"].get(key), row["measured"].get(key)
    return predicted / measured if predicted and measured else None


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    measured = row["measured"]
    cells = [row["case"], row["run"]]
    for key, factor, digits in (
        ("step_s", 1e3, 2),
        ("compute_s", 1e3, 2),
        ("memory_nbytes", 1 / MIB, 0),
        ("power_W", 1, 0),
    ):
        value, of = measured.get(key), ratio(row, key)
        cells.append("-" if value is None else f"{factor * value:.{digits}f} ({'-' if of is None else f'{of:.2f}'})")
    return f"| {' | '.join(cells)} |"


def summary(found: list[dict[str, Any]]) -> list[str]:
    """Return the median errors of each kind of run, and the part of memory predictions that were large enough."""
    lines = []
    for number in ("first", "second"):
        mine = [row for row in found if row["run"] == number]
        for key, words in (("step_s", "step"), ("compute_s", "computing"), ("power_W", "power")):
            ratios = [abs(log(r)) for row in mine if (r := ratio(row, key))]
            if ratios:
                median_error, largest = (100 * (exp(f(ratios)) - 1) for f in (median, max))
                lines.append(f"{number} runs, {words}: median error {median_error:.0f} %, largest {largest:.0f} %")
        memory = [r for row in mine if (r := ratio(row, "memory_nbytes"))]
        if memory:
            enough = sum(r >= 1 for r in memory)
            lines.append(
                f"{number} runs, memory: {enough} of {len(memory)} predictions at least what was measured, "
                f"median ratio {median(memory):.2f}"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file of rows to write")
    parser.add_argument("--model", choices=list(dict.fromkeys(model for model, *_ in CASES)))
    add_option(parser)
    options = parser.parse_args()
    device = chosen(options.device)
    if device is None:
        return 2
    on_gpu = device != "cpu"
    node = {"name": "this", "device": device, "cpu": len(os.sched_getaffinity(0)), "memory": "64Gi"}
    view = cluster_view({"nodes": [node]})
    print(f"{device}; {machine()}")
    print("| case | run | step, ms (ratio) | computing, ms (ratio) | memory, MiB (ratio) | power, W (ratio) |")
    print("|---" * 6 + "|")
    found: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for model, dataset, batch, steps, precisions in CASES:
            if options.model not in (None, model) or not (on_gpu or model in ON_CPU):
                continue
            for precision in precisions:
                case = Case(model, dataset, batch, steps if on_gpu else steps // 10, precision)
                try:
                    mine = rows(case, view, device)
                except SystemExit as error:
                    print(f"| {case.name} | failed: {error} |", flush=True)
                    continue
                found += mine
                print("\n".join(map(line, mine)), flush=True)
                if options.json:
                    options.json.write_text(json.dumps({"device": device, "rows": found}), encoding="utf-8")
    print("\n".join(summary(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
