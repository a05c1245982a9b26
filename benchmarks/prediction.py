"""Step times predicted and measured on this machine: from the catalogue alone, and after one run has taught a profile.

    python benchmarks/prediction.py [--json] [--model digits-cnn --batch 96 --ranks 3]

Runs the built-in trainer as real MPI ranks over TCP, each planned as a node with its part of this machine's cores, and
compares the median step with the plan's. The second plan reads the profile that the first run taught, and is compared
with a second run. Beside both: what the runs on fewer ranks let the planner say of the first one before it was made.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from dljob.api import DLJobSpec, DLProfileStatus
from dljob.calibrate import Place
from dljob.cluster import ClusterView, cluster_view
from dljob.contract import CPUS_VARIABLE, Plan, ProbePoint, RankMeasure, Report, RunPhase
from dljob.planner import Decision, Infeasible, Learned, Prediction, plan
from dljob.profiles import learned, taught
from dljob.request import contract_plan, planner_request, profile_key
from dltrain.messages import PLAN_ENV, SOCKET_ENV

CASES = (("digits-cnn", "digits", 96), ("mlp", "digits", 96), ("resnet18", "synthetic-images", 24))
STEPS = {"digits-cnn": 150, "mlp": 300, "resnet18": 12}


@dataclass
class News:
    """What all ranks of a run said."""

    steps_s: list[float] = field(default_factory=list)
    measures: dict[int, RankMeasure] = field(default_factory=dict)
    probes: list[ProbePoint] = field(default_factory=list)
    links: list[tuple[float, float]] = field(default_factory=list)

    def take(self, line: str) -> None:
        news = json.loads(line)
        if news["type"] == "step":
            self.measures[news["rank"]] = RankMeasure.model_validate(news["measure"])
            if news["rank"] == 0:
                self.steps_s.append(news["step_s"])
        elif news["type"] == "probed":
            self.probes += [ProbePoint.model_validate(p) for p in news["points"]]
            if news["link_latency_s"] is not None:
                self.links.append((news["link_latency_s"], news["link_bandwidth_Bps"]))


def listen(server: socket.socket, news: News) -> None:
    """Collect the lines of every rank that connects, until the server is closed."""

    def read(connection: socket.socket) -> None:
        with connection, connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                news.take(line)

    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=read, args=(connection,), daemon=True).start()


def train(todo: Plan, timeout_s: float) -> News:
    """Run the plan's ranks on this machine. Ends the program when they fail."""
    news = News()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = Path(folder, "plan.json")
        path.write_text(todo.to_json(), encoding="utf-8")
        server.bind(f"{folder}/agent")
        server.listen(len(todo.ranks))
        threading.Thread(target=listen, args=(server, news), daemon=True).start()
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpirun = Path(sys.prefix, "bin", "mpirun")
        placed = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--mca", "btl", "self,tcp"]
        command = [str(mpirun), *root, *placed, "-n", str(len(todo.ranks)), sys.executable, "-m", "dltrain.rank"]
        env = os.environ | {PLAN_ENV: str(path), SOCKET_ENV: f"{folder}/agent", CPUS_VARIABLE: "1000"}
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"{len(todo.ranks)} ranks were not done after {timeout_s:g} s") from None
    if code:
        raise SystemExit(f"{len(todo.ranks)} ranks ended with code {code}")
    return news


def report(todo: Plan, news: News) -> Report:
    """What the job's coordinator would report."""
    latency_s, bandwidth_Bps = (max(values) for values in zip(*news.links, strict=True)) if news.links else (None, None)
    return Report(
        uid=todo.uid,
        plan_number=1,
        plan_digest=todo.digest(),
        term=1,
        phase=RunPhase.SUCCEEDED,
        unix_s=0.0,
        ranks=tuple(news.measures.values()),
        probes=tuple(news.probes),
        link_latency_s=latency_s,
        link_bandwidth_Bps=bandwidth_Bps,
        step_s=steady_s(news),
    )


def steady_s(news: News) -> float:
    return median(news.steps_s[len(news.steps_s) // 3 :])


def one(
    model: str, dataset: str, batch: int, ranks: int, view: ClusterView, fewer: DLProfileStatus
) -> tuple[dict[str, object], DLProfileStatus]:
    """Predictions and measurements, and ``fewer``, what runs on fewer ranks taught, with what the first run taught."""
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
        todo = contract_plan("benchmark", "default", "0", spec, decision, 1, 1, "benchmark", "cluster.local")
        news = train(todo, 300)
        prediction = decision.chosen.prediction
        row[basis] = compared(prediction, steady_s(news))
        profile = taught(profile, key, "cpu", report(todo, news), datetime.now(UTC), place)
        if basis == "catalogue":
            if fewer.scaling:
                row["fewer ranks"] = compared(decided(spec, view, fewer).chosen.prediction, steady_s(news))
            fewer = taught(fewer, key, "cpu", report(todo, news), datetime.now(UTC), place)
    return row, fewer


def decided(spec: DLJobSpec, view: ClusterView, profile: DLProfileStatus) -> Decision:
    known = (
        {(profile_key(spec), "cpu"): learned(profile)} if profile.observed_jobs else dict[tuple[str, str], Learned]()
    )
    decision = plan(planner_request("benchmark", spec), view, known)
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
        fewer = DLProfileStatus()
        for ranks in args.ranks:
            nodes = [{"name": f"n{i}", "cpu": f"{min(1000, 1000 * cores // ranks)}m"} for i in range(ranks)]
            row, fewer = one(model, dataset, args.batch or batch, ranks, cluster_view({"nodes": nodes}), fewer)
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
