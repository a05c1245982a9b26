"""Run a job on this machine, plan its batch size from the noise scale that it measured, and run that plan.

    python -m benchmarks.training.batch_size_run [--seeds 3] [--batch 8] [--most 256] [--json]

The built-in trainer runs as MPI ranks: digits-cnn on scikit-learn's digits. The output has noise scale, batch size,
steps, seconds and accuracy on held-out digits for the user's batch size and for the chosen one, as means over seeds,
and the paired difference of the accuracies with its standard error. ``benchmarks/planner/batch_size.py`` scores the
choice on public measurements.
"""

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from statistics import fmean, stdev

from benchmarks.lib.local_ranks import RANK, mpirun, run_with_messages

from dlcontract import CPUS_VARIABLE, Noise, Outcome, Plan, RankMeasure, Report, RunPhase
from dljob.api import DLJobSpec, DLProfileStatus
from dljob.calibrate import Place
from dljob.cluster import cluster_view
from dljob.job.identity import data_key, profile_key
from dljob.job.plan.request import planner_request
from dljob.job.plan.trainer import trainer_plan
from dljob.job.profiles import learned, updated_profile
from dljob.planner import Decision, plan

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--most", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds: found {options.seeds}; expected at least 2 to compare accuracies")
    rows = [row for seed in range(options.seeds) for row in pair(seed, options)]
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    for kind in ("user's", "chosen"):
        chosen = [row for row in rows if row["kind"] == kind]
        keys = ("batch", "noise", "steps", "seconds", "accuracy")
        means = {key: fmean(float(row[key]) for row in chosen) for key in keys}
        sys.stdout.write(
            f"{kind:<7} batch {means['batch']:5.0f}  noise scale {means['noise']:6.0f}  steps {means['steps']:5.0f}  "
            f"{means['seconds']:5.2f} s  accuracy {100 * means['accuracy']:.2f} %\n"
        )
    more = [float(b["accuracy"]) - float(a["accuracy"]) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    error = stdev(more) / len(more) ** 0.5
    sys.stdout.write(f"accuracy, chosen minus user's: {100 * fmean(more):+.2f} points ± {100 * error:.2f}\n")


def pair(seed: int, options: argparse.Namespace) -> list[dict[str, float | str]]:
    """Run the user's batch size, and the one that is planned with the profile of that run."""
    spec = DLJobSpec.model_validate(
        {
            "model": {"name": "digits-cnn"},
            "dataset": {"name": "digits"},
            "globalBatchSize": options.batch,
            "batchSizeRange": {"max": options.most},
            "epochs": options.epochs,
            "seed": seed,
            "nodes": {"min": RANKS, "max": RANKS},
            "collective": "Ring",
            "checkpoint": {"enabled": False},
        }
    )
    view = cluster_view({"nodes": [{"name": "here", "count": RANKS, "cpu": 1, "memory": "4Gi"}]})
    profile, rows = DLProfileStatus(), []
    for kind in ("user's", "chosen"):
        known = {(profile_key(spec), "cpu"): learned(profile)} if profile.observed_jobs else {}
        decision = plan(planner_request("benchmark", spec), view, known)
        assert isinstance(decision, Decision), decision
        todo = trainer_plan("benchmark", "default", "0", spec, decision, 1, 1, "benchmark", "cluster.local")
        report = run(todo)
        profile = updated_profile(
            profile, profile_key(spec), "cpu", report, datetime.now(UTC), Place(RANKS, 1), data_key(spec)
        )
        assert report.outcome is not None and report.outcome.accuracy is not None and report.noise is not None
        rows.append(
            {
                "kind": kind, "seed": seed, "batch": todo.global_batch, "noise": report.noise.samples,
                "steps": report.outcome.steps, "seconds": report.outcome.seconds, "accuracy": report.outcome.accuracy,
            }
        )  # fmt: skip
        if not options.json:
            texts = [
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in rows[-1].items()
            ]
            sys.stdout.write(", ".join(texts) + "\n")
            sys.stdout.flush()
    return rows


def run(todo: Plan) -> Report:
    """Run the plan on this machine and return the report that a job's coordinator would write."""
    measures: dict[int, RankMeasure] = {}
    noise: list[Noise] = []
    outcomes: list[Outcome] = []
    steps_s: list[float] = []

    def on_message(line: str) -> None:
        message = json.loads(line)
        if message["type"] == "step":
            measures[message["rank"]] = RankMeasure.model_validate(message["measure"])
            if message["rank"] == 0:
                steps_s.append(message["step_s"])
                noise.extend([Noise.model_validate(message["noise"])] if message["noise"] else [])
        elif message["type"] == "finished" and message["rank"] == 0:
            outcomes.append(Outcome.model_validate(message["outcome"]))

    command = [*mpirun(RANKS), sys.executable, *RANK]
    run_with_messages(todo, command, on_message, 120, {CPUS_VARIABLE: "1000"}, subprocess.DEVNULL)
    return Report(
        uid=todo.uid, plan_number=1, plan_digest=todo.digest(), term=1, phase=RunPhase.SUCCEEDED, unix_s=0.0,
        ranks=tuple(measures.values()), step_s=steps_s[-1], noise=noise[-1], outcome=outcomes[-1],
    )  # fmt: skip


if __name__ == "__main__":
    main()
