"""Compare predicted with measured step times on this machine, from the catalogue and with the profile of one run.

    python -m benchmarks.perfmodel.prediction [--json] [--model digits-cnn --batch 96 --ranks 3]

The built-in trainer runs as MPI ranks over TCP. The planner treats each rank as a node with its part of this machine's
cores. The median step is compared with the plan's. The second plan uses the profile of the first run and is compared
with a second run. The output also has the prediction of the first run from runs on fewer ranks only.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median

from benchmarks.lib.local_ranks import RANK, mpirun, run_with_messages

from dlcontract import CPUS_VARIABLE, Plan, ProbePoint, RankMeasure, Report, RunPhase
from dljob.api import DLJobSpec, DLProfileStatus
from dljob.calibrate import Place
from dljob.cluster import ClusterView, cluster_view
from dljob.job.identity import profile_key
from dljob.job.plan.request import planner_request
from dljob.job.plan.trainer import trainer_plan
from dljob.job.profiles import learned, updated_profile
from dljob.planner import Decision, Infeasible, Learned, Prediction, plan

CASES = (("digits-cnn", "digits", 96), ("mlp", "digits", 96), ("resnet18", "synthetic-images", 24))
STEPS = {"digits-cnn": 150, "mlp": 300, "resnet18": 12}


@dataclass
class RunMessages:
    """Messages of all ranks of a run."""

    steps_s: list[float] = field(default_factory=list)
    measures: dict[int, RankMeasure] = field(default_factory=dict)
    probes: list[ProbePoint] = field(default_factory=list)
    links: list[tuple[float, float]] = field(default_factory=list)

    def add(self, line: str) -> None:
        message = json.loads(line)
        if message["type"] == "step":
            self.measures[message["rank"]] = RankMeasure.model_validate(message["measure"])
            if message["rank"] == 0:
                self.steps_s.append(message["step_s"])
        elif message["type"] == "probed":
            self.probes += [ProbePoint.model_validate(p) for p in message["points"]]
            if message["link_latency_s"] is not None:
                self.links.append((message["link_latency_s"], message["link_bandwidth_Bps"]))


def train(todo: Plan, timeout_s: float, cpus: int = 1, transports: str = "self,tcp") -> RunMessages:
    """Run the plan's ranks on this machine. Raise SystemExit if they fail.

    ``cpus``: CPU request of the pod that the ranks share. ``transports``: Open MPI's transports between ranks.
    """
    messages = RunMessages()
    command = [*mpirun(len(todo.ranks), "--mca", "btl", transports), sys.executable, *RANK]
    run_with_messages(todo, command, messages.add, timeout_s, {CPUS_VARIABLE: f"{1000 * cpus}"}, subprocess.DEVNULL)
    return messages


def report(todo: Plan, messages: RunMessages) -> Report:
    """Return the report that a job's coordinator would write."""
    latency_s, bandwidth_Bps = (
        (max(values) for values in zip(*messages.links, strict=True)) if messages.links else (None, None)
    )
    return Report(
        uid=todo.uid,
        plan_number=1,
        plan_digest=todo.digest(),
        term=1,
        phase=RunPhase.SUCCEEDED,
        unix_s=0.0,
        ranks=tuple(messages.measures.values()),
        probes=tuple(messages.probes),
        link_latency_s=latency_s,
        link_bandwidth_Bps=bandwidth_Bps,
        step_s=steady_s(messages),
    )


def steady_s(messages: RunMessages) -> float:
    return median(messages.steps_s[len(messages.steps_s) // 3 :])


def predict_and_measure(
    model: str, dataset: str, batch: int, ranks: int, view: ClusterView, smaller_runs: DLProfileStatus
) -> tuple[dict[str, object], DLProfileStatus]:
    """Train once as the data sheets plan it and once as the first run plans it, and compare predictions with both runs.

    Return (a row of the table, ``smaller_runs`` with the measurements of the first run). ``smaller_runs``: the profile
    from runs on fewer ranks, whose prediction is compared with the first run, too.
    """
    spec = DLJobSpec.model_validate(
        {
            "model": {"name": model},
            "dataset": {"name": dataset},
            "globalBatchSize": batch,
            "steps": STEPS.get(model, 100),
            "nodes": {"min": ranks, "max": ranks},
            "collective": "Ring",
            "checkpoint": {"enabled": False},
        }
    )
    row: dict[str, object] = {"model": model, "batch": batch, "ranks": ranks}
    profile, key, place = DLProfileStatus(), profile_key(spec), Place(ranks, 1)
    for basis in ("catalogue", "profile"):
        decision = decided(spec, view, profile)
        todo = trainer_plan("benchmark", "default", "0", spec, decision, 1, 1, "benchmark", "cluster.local")
        messages = train(todo, 300)
        prediction = decision.chosen.prediction
        row[basis] = compared(prediction, steady_s(messages))
        profile = updated_profile(profile, key, "cpu", report(todo, messages), datetime.now(UTC), place)
        if basis == "catalogue":
            if smaller_runs.scaling:
                row["fewer ranks"] = compared(decided(spec, view, smaller_runs).chosen.prediction, steady_s(messages))
            smaller_runs = updated_profile(smaller_runs, key, "cpu", report(todo, messages), datetime.now(UTC), place)
    return row, smaller_runs


def decided(spec: DLJobSpec, view: ClusterView, profile: DLProfileStatus) -> Decision:
    profiles = (
        {(profile_key(spec), "cpu"): learned(profile)} if profile.observed_jobs else dict[tuple[str, str], Learned]()
    )
    decision = plan(planner_request("benchmark", spec), view, profiles)
    if isinstance(decision, Infeasible):
        raise SystemExit(f"{decision.field}: {decision.message}")
    return decision


def compared(prediction: Prediction, measured_s: float) -> dict[str, float]:
    return {
        "predicted_s": prediction.step_s,
        "p90_s": prediction.step_p90_s,
        "measured_s": measured_s,
        "error": prediction.step_s / measured_s - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=[m for m, _, _ in CASES])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3])
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rows = []
    for model, dataset, batch in CASES:
        if args.model not in (None, model):
            continue
        smaller_runs = DLProfileStatus()
        for ranks in args.ranks:
            nodes = [{"name": f"n{i}", "cpu": f"{min(1000, 1000 * cores // ranks)}m"} for i in range(ranks)]
            row, smaller_runs = predict_and_measure(
                model, dataset, args.batch or batch, ranks, cluster_view({"nodes": nodes}), smaller_runs
            )
            rows.append(row)
            if not args.json:
                text = [f"{model:12} batch {rows[-1]['batch']} on {ranks} ranks:"]
                for basis in ("catalogue", "profile", "fewer ranks"):
                    figures = rows[-1].get(basis)
                    if figures is None:
                        continue
                    assert isinstance(figures, dict)
                    text.append(
                        f"{basis} {1e3 * figures['predicted_s']:.2f} ms (p90 {1e3 * figures['p90_s']:.2f}), "
                        f"measured {1e3 * figures['measured_s']:.2f} ms, {100 * figures['error']:+.0f} %"
                    )
                print("; ".join([" ".join(text[:2]), *text[2:]]), flush=True)
    if args.json:
        print(json.dumps({"cores": cores, "rows": rows}))


if __name__ == "__main__":
    main()
