"""Compare first predictions by data sheets and by the hardware probe with measured steps, on this machine.

    python -m benchmarks.perfmodel.first_prediction [--rounds 3] [--json FILE] [--model digits-cnn] [--computing]

In each round, the hardware probe runs first. Then the built-in trainer runs each case (model, batch, one or two ranks
with one core each, MPI over shared memory), and no measurement of a case enters its prediction. Three times are
compared with their predictions: the median step, the lower decile of the steps, and the CPU time of computing on one
rank, without trainer and communication. The median step and the decile are equal on an idle machine. On a busy one,
only the CPU time says what the hardware can do. Ratios are predicted / measured, medians over the rounds. Last come the
medians of the absolute errors over the cases. ``--computing`` measures the CPU times alone, also on a busy machine.

The constants of the data sheet were measured on machines much like this one may be. Without the newer vector units, a
processor has other ratios of arithmetic to memory, as an older one has. PyTorch's libraries leave them unused with
ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 ATEN_CPU_CAPABILITY=default in the environment, which counts for
the probe and for the models.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH
from benchmarks.perfmodel import structure_regression
from benchmarks.perfmodel.core_scaling import MACHINE
from benchmarks.perfmodel.prediction import train

from dlcontract.hardware import HardwareMeasure
from dljob.api import DLJobSpec
from dljob.calibrate.learned import Learned
from dljob.calibrate.learned import hardware_of as probed_hardware
from dljob.cluster import catalogue
from dljob.cluster.hardware import KEY
from dljob.job.plan.request import planner_request
from dljob.job.plan.trainer import trainer_plan
from dljob.job.probes.hardware import hardware_of, hardware_profile
from dljob.perf.step.compute import loop_s
from dljob.planner import Decision, plan
from dltrain.hardware_probe.structures import prepare

CASES = (
    ("mlp", "digits", 64, 300),
    ("digits-cnn", "digits", 32, 200),
    ("digits-cnn", "digits", 96, 120),
    ("lenet", "synthetic-images", 32, 120),
    ("gpt-mini", "synthetic-tokens", 4, 25),
    ("resnet18", "synthetic-images", 4, 12),
)
"""Model, dataset, samples of each rank, and steps."""
WARM_UP = 0.25
"""Part of the steps that does not count."""
Constants = dict[tuple[str, str], Learned]


@dataclass(frozen=True)
class Case:
    model: str
    dataset: str
    batch: int
    steps: int
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.batch} per rank, {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    def decided(self, known: Constants) -> tuple[DLJobSpec, Decision]:
        spec = DLJobSpec.model_validate(
            {
                "model": {"name": self.model},
                "dataset": {"name": self.dataset},
                "globalBatchSize": self.batch * self.ranks,
                "steps": self.steps,
                "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1, "ranksPerNode": self.ranks}]},
                "resources": {"cpu": str(self.ranks)},
                "collective": "Ring",
                "checkpoint": {"enabled": False},
            }
        )
        found = plan(planner_request("benchmark", spec), MACHINE, known)
        if not isinstance(found, Decision):
            raise SystemExit(f"{self.name}: {found.message}")
        return spec, found

    def computing_s(self) -> float:
        """Return the CPU time in seconds of the computing of a step, without trainer and communication."""
        of_built_in = structure_regression.of_built_in
        return structure_regression.measured(lambda: of_built_in(self.model, self.dataset, self.batch)).cpu_s

    def measured(self, computing_only: bool) -> dict[str, float]:
        """Return the seconds of a step: median, lower decile and, on one rank, CPU time of computing."""
        if computing_only:
            return {"computing": self.computing_s()}
        spec, decision = self.decided({})
        todo = trainer_plan("benchmark", "default", "0", spec, decision, 1, 1, "benchmark", "cluster.local")
        steps_s = train(todo, 300, self.ranks, "self,sm").steps_s
        steady = steps_s[int(WARM_UP * len(steps_s)) :]
        found = {"step": median(steady), "decile": quantiles(steady, n=10)[0]}
        if self.ranks == 1:
            found["computing"] = self.computing_s()
        return found


def probed() -> tuple[Constants, HardwareMeasure]:
    """Run the hardware probe, and return the constants that plans use, and its document."""
    command = [sys.executable, "-m", "dltrain.hardware_probe", "--device", "cpu", "--node-link"]
    ran = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, stdout=subprocess.PIPE, text=True, check=True
    )
    measure = HardwareMeasure.parse(ran.stdout.splitlines()[-1])
    return {(KEY, "cpu"): Learned(hardware=hardware_of(hardware_profile(measure, "cpu"), "cpu"))}, measure


def row(case: Case, known: Constants, computing_only: bool) -> dict[str, Any]:
    """Measure a case, and return it with both predictions."""
    found: dict[str, Any] = {"case": case.name, "measured": case.measured(computing_only)}
    sources: dict[str, Constants] = {"data sheets": {}, "probe": known}
    for name, constants in sources.items():
        prediction = case.decided(constants)[1].chosen.prediction
        hardware, core = probed_hardware("cpu", constants), catalogue.cpu("cpu", 1.0)
        loop = loop_s(core if hardware is None else hardware.device(core), 1.0)  # computing is measured without it
        found[name] = {
            "step": prediction.step_s,
            "computing": prediction.compute_s - loop,
            "p90": prediction.step_p90_s,
        }
    return found


KINDS = {"step": "median step", "decile": "lower decile of steps", "computing": "CPU time of computing"}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of the medians over the rounds for each kind of time, and the errors over all cases."""
    lines = []
    for kind, words in KINDS.items():
        if not any(kind in each["measured"] for each in rows):
            continue
        lines += [f"{words}", "| case | measured, ms | data sheets, ms (ratio) | probe, ms (ratio) |", "|---" * 4 + "|"]
        errors: dict[str, list[float]] = {}
        for name in dict.fromkeys(each["case"] for each in rows if kind in each["measured"]):
            mine = [each for each in rows if each["case"] == name]
            cells = [f"{1e3 * median(each['measured'][kind] for each in mine):.2f}"]
            for source in ("data sheets", "probe"):
                predicted = [each[source]["computing" if kind == "computing" else "step"] for each in mine]
                ratio = median(p / each["measured"][kind] for p, each in zip(predicted, mine, strict=True))
                errors.setdefault(source, []).append(abs(log(ratio)))
                cells.append(f"{1e3 * median(predicted):.2f} ({ratio:.2f})")
            lines.append(f"| {name} | {' | '.join(cells)} |")
        for source, found in errors.items():
            within = sum(each <= log(1.25) for each in found)
            lines.append(
                f"{source}: median error {100 * (exp(median(found)) - 1):.0f} %, largest "
                f"{100 * (exp(max(found)) - 1):.0f} %; {within} of {len(found)} cases within 25 %"
            )
        lines.append("")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=sorted({model for model, *_ in CASES}))
    parser.add_argument("--json", type=Path, help="file of rows and probes to create or extend")
    parser.add_argument("--computing", action="store_true", help="measure CPU times of computing alone")
    options = parser.parse_args()
    prepare()
    torch.set_num_threads(1)
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rows: list[dict[str, Any]] = before.get("rows", [])
    probes: list[dict[str, Any]] = before.get("probes", [])
    for _ in range(options.rounds):
        known, document = probed()
        probes.append(document.manifest())
        for model, dataset, batch, steps in CASES:
            for ranks in (1,) if options.computing else (1, 2):
                if options.model in (None, model):
                    rows.append(row(Case(model, dataset, batch, steps, ranks), known, options.computing))
                    print(".", end="", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "rows": rows, "probes": probes}))
    crowded = median(float(each.get("crowded", 1.0)) for each in probes)
    print(f"\n{len(probes)} probes, {len(rows)} runs, one core per rank; {machine()}")
    print(f"elapsed time / CPU time of the probe: {crowded:.2f}\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
