"""Compare predicted with measured step times of real jobs on a cluster: first runs of a model, and second runs.

Run after ``hack/quickstart --no-job`` (images present, operator installed), on an otherwise idle machine:

    KUBECONFIG=$(hack/cluster kubeconfig) hack/env python -m benchmarks.predictions --json predictions.json

Each configuration (model, dataset, batch, ranks, cores, collective) runs twice in a row in each round. Before the first
run, the benchmark deletes the profiles of its model, and the basis of the plan must be ``probe``. No other
configuration with the same model helps. Those with other models only help to tell how far equal runs are apart, which
is part of the intervals of second predictions. The second run must have the basis ``profile``. Without a hardware
profile, the benchmark waits for the operator's probe, and otherwise runs ``dljob probe``. Each job trains for about
``--seconds`` seconds by data sheets.

The prediction is that of ``status.plan`` before the job runs, and the measured step time that of ``status.measured``
after its end, which is a mean over the last steps. An error is |predicted / measured - 1|. The 90 % interval of a step
has the 5th and the 95th percentile of the log-normal distribution with the median and the p90 of the status. The
binomial intervals are those of Wilson (95 %). A prediction from one earlier run has the noise of the machine: the
printed repeat noise is the median of |first / second measured step - 1|, whose runs have equal plans. Repeats of a
configuration are not independent, so there is a second interval, which counts each configuration once. The total time
is ``status.result.seconds``, which includes the time to build and evaluate the model.

``--json FILE`` is written after each pair of runs, with the profiles behind the predictions. With a file of an earlier
call, only the missing pairs run. Without missing pairs, the figures are printed without a cluster.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster.jobs import kubectl
from benchmarks.lib.goals import table
from benchmarks.predictions.figures import figures, groups, rows, times

from dljob.api import DLJobSpec
from dljob.calibrate import Learned
from dljob.cluster import cluster_view
from dljob.cluster.hardware import KEY
from dljob.job.identity import profile_key
from dljob.job.plan.request import planner_request
from dljob.planner import Decision, plan
from dljob.planner.types import Prediction

Json = dict[str, Any]
Constants = dict[tuple[str, str], Learned]
NAMESPACE = "benchmark-predictions"
PROBE_S, PROFILE_S, STALE_TRIES = 60.0, 60.0, 5
MIN_STEPS, MAX_STEPS = 12, 2000
VIEW = cluster_view({"nodes": [{"name": f"n{i}", "cpu": "2", "machine": "m", "machineCpu": "1.85"} for i in range(3)]})
"""The nodes of the development cluster on two cores, by which the number of steps is chosen."""


@dataclass(frozen=True)
class Configuration:
    model: str
    dataset: str
    batch: int
    """Global batch size."""
    nodes: int = 1
    ranks_per_node: int = 1
    cpu: int = 1
    """CPUs of each pod."""
    collective: str = "Ring"

    @property
    def name(self) -> str:
        ranks = f"{self.nodes}x{self.ranks_per_node} ranks, {self.cpu} CPU"
        return f"{self.model}, {self.dataset}, {self.batch}, {ranks}, {self.collective}"

    def spec(self, steps: int) -> Json:
        group = {"device": "cpu", "nodes": self.nodes, "ranksPerNode": self.ranks_per_node}
        return {
            "model": {"name": self.model},
            "dataset": {"name": self.dataset},
            "globalBatchSize": self.batch,
            "steps": steps,
            "planning": {"mode": "Fixed", "groups": [group]},
            "resources": {"cpu": str(self.cpu)},
            "collective": self.collective,
            "checkpoint": {"enabled": False},
        }

    @property
    def profile(self) -> str:
        """Return the key of the profile with the measurements of this model and dataset."""
        return profile_key(DLJobSpec.model_validate(self.spec(1)))

    def predicted(self, steps: int, known: Constants) -> Prediction:
        """Return the prediction for a job of so many steps on the development cluster.

        ``known``: measured constants by (model key, device type).
        """
        found = plan(planner_request(NAMESPACE, DLJobSpec.model_validate(self.spec(steps))), VIEW, known)
        if not isinstance(found, Decision):
            raise SystemExit(f"{self.name}: {found.field}: {found.message}")
        return found.chosen.prediction

    def steps(self, seconds: float) -> int:
        """Return the number of steps that take ``seconds`` seconds by data sheets, within limits."""
        return min(max(MIN_STEPS, round(seconds / self.predicted(100, {}).step_s)), MAX_STEPS)


CONFIGURATIONS = (
    Configuration("mlp", "breast-cancer", 32),
    Configuration("mlp", "digits", 512),
    Configuration("digits-cnn", "digits", 16),
    Configuration("digits-cnn", "digits", 128),
    Configuration("lenet", "synthetic-images", 64),
    Configuration("resnet18", "digits", 16),
    Configuration("gpt-mini", "synthetic-tokens", 4),
    Configuration("digits-cnn", "digits", 128, cpu=2),
    Configuration("resnet18", "digits-32", 8, cpu=2),
    Configuration("gpt-mini", "python-source", 8, cpu=2),
    Configuration("resnet50", "digits", 16, cpu=2),
    Configuration("digits-cnn", "digits", 64, nodes=2),
    Configuration("lenet", "synthetic-images", 128, nodes=2),
    Configuration("gpt-mini", "synthetic-tokens", 8, nodes=2, collective="Auto"),
    Configuration("mlp", "digits", 64, nodes=2, collective="Tree"),
    Configuration("digits-cnn", "digits", 192, ranks_per_node=2, cpu=2, collective="HalvingDoubling"),
    Configuration("resnet18", "digits", 32, ranks_per_node=2, cpu=2),
    Configuration("digits-cnn", "digits", 120, nodes=3),
    Configuration("lenet", "digits-32", 48, nodes=3, collective="ParameterServer"),
    Configuration("gpt-mini", "synthetic-tokens", 6, nodes=3),
)


def profiles() -> list[Json]:
    items: list[Json] = json.loads(kubectl("get", "dlprofiles", "-o", "json"))["items"]
    return items


def hardware() -> list[Json]:
    """Return the hardware profiles of the cluster."""
    return [p for p in profiles() if p["spec"]["model"] == KEY and (p.get("status") or {}).get("hardware")]


def wait(what: str, found: Callable[[], bool], deadline_s: float) -> bool:
    """Wait until ``found()`` is true. Return False if it is not within ``deadline_s`` seconds, and print ``what``."""
    end_s = time.monotonic() + deadline_s
    while not found():
        if time.monotonic() > end_s:
            print(f"{what}: not within {deadline_s:g} s", file=sys.stderr)
            return False
        time.sleep(0.5)
    return True


def probe(words: list[str]) -> None:
    """Measure the hardware of the nodes by ``dljob probe`` with the options ``words``.

    Without ``words``, measure it only if the cluster has no hardware profile, and wait for the operator's probe first.
    """
    if words or not (hardware() or wait("the operator's probe", lambda: bool(hardware()), PROBE_S)):
        subprocess.run([sys.executable, "-m", "dljob.cli", "probe", "--device", "cpu", *words], check=False)
        if not hardware():
            raise SystemExit("dljob probe: found no hardware profile after it; expected one. See its output above")


def forget(configurations: Iterable[Configuration]) -> None:
    """Delete the profiles of the models of ``configurations``, and wait until they are gone. Hardware profiles stay."""
    keys = {each.profile for each in configurations}
    names = [p["metadata"]["name"] for p in profiles() if p["spec"]["model"] in keys]
    if names:
        kubectl("delete", "dlprofiles", "--wait=true", *names)


def statuses(name: str, deadline_s: float) -> Iterator[Json]:
    """Yield each status of a job by one watch, which costs less CPU than polling. Raise TimeoutError."""
    command = ["kubectl", "get", "dljob", name, "-n", NAMESPACE, "--watch", "-o", "json"]
    limited = ["timeout", str(int(deadline_s)), *command]
    with subprocess.Popen(limited, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line)
                if line.rstrip("\n") == "}":
                    yield json.loads("".join(lines)).get("status") or {}
                    lines = []
        finally:
            process.terminate()
    raise TimeoutError(f"found no end of the job after {deadline_s:g} s")


def trained(configuration: Configuration, name: str, steps: int, basis: str, deadline_s: float) -> Json | None:
    """Run a job and delete it. Return its prediction before the run and its measurements.

    Return None, before the run, if the plan has another basis than ``basis``. Raise RuntimeError if the job fails.
    """
    metadata = {"name": name, "namespace": NAMESPACE}
    job = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": metadata, "spec": configuration.spec(steps)}
    began_s = time.monotonic()
    planned: Json | None = None
    kubectl("apply", "-f", "-", stdin=json.dumps(job))
    try:
        for status in statuses(name, deadline_s):
            phase = status.get("phase")
            if phase == "Failed":
                raise RuntimeError(f"failed: {status['conditions']}")
            if planned is None and status.get("plan"):
                planned = status["plan"]
                if phase == "Running" or status.get("measured"):
                    raise RuntimeError(f"found its first plan in phase {phase}; expected it before the run")
                if planned["predicted"]["basis"] != basis:
                    return None
            if phase == "Complete" and planned and status.get("measured") and status.get("result"):
                break
        assert planned is not None, "otherwise the loop has raised TimeoutError"
        report = json.loads(kubectl("get", "configmap", "-n", NAMESPACE, f"{name}-report", "-o", "json"))
        if status["plan"]["number"] != planned["number"]:
            raise RuntimeError(f"found plan {status['plan']['number']} at the end; expected {planned['number']}")
        return {
            "predicted": planned["predicted"],
            "summary": planned["summary"],
            "measured_s": status["measured"]["stepSeconds"],
            "total_s": status["result"]["seconds"],
            "startup": status.get("startup"),
            "wall_s": time.monotonic() - began_s,
            "report": json.loads(report["data"]["report.json"]),
        }
    finally:
        kubectl("delete", "dljob", "-n", NAMESPACE, name, "--wait=true")
        while kubectl("get", "pods", "-n", NAMESPACE, "-l", f"dljob.dev/job={name}", "-o", "name").strip():
            time.sleep(0.3)


def pair(configuration: Configuration, number: int, seconds: float, deadline_s: float) -> list[Json]:
    """Run a configuration before any run of its model, and again. Return both runs, ``number`` is that of the round."""
    steps = configuration.steps(seconds)
    for _ in range(STALE_TRIES):  # The operator may not have seen yet that the profiles are deleted.
        forget([configuration])
        if first := trained(configuration, f"first-{number}", steps, "probe", deadline_s):
            break
    else:
        raise RuntimeError("found a plan from other measurements than the probe; expected the basis probe")
    if not wait("the profile of the first run", partial(_measured, configuration.profile), PROFILE_S):
        raise RuntimeError("found no profile after the first run; expected one")
    learned = [p["status"] for p in profiles() if p["spec"]["model"] == configuration.profile]
    for _ in range(STALE_TRIES):
        if second := trained(configuration, f"second-{number}", steps, "profile", deadline_s):
            break
    else:
        raise RuntimeError("found no plan from the profile of the first run; expected the basis profile")
    about = {"configuration": asdict(configuration), "name": configuration.name, "round": number, "steps": steps}
    return [{**about, "run": 1, **first}, {**about, "run": 2, **second, "profile": learned}]


def _measured(key: str) -> bool:
    return any(p["spec"]["model"] == key and (p.get("status") or {}).get("compute") for p in profiles())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--configurations", type=int, default=len(CONFIGURATIONS), help="only the first so many")
    parser.add_argument("--match", default="", help="only configurations whose name contains this text")
    parser.add_argument("--seconds", type=float, default=4.0, help="training time of a job by data sheets")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for one job")
    parser.add_argument(
        "--probe", nargs="*", default=[], metavar="WORD", help="run dljob probe first with these options, such as link"
    )
    parser.add_argument("--json", type=Path, help="file of runs to create or extend")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    found: Json = {"machine": platform.platform(), "runs": [], "failed": []}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    done = {(run["name"], run["round"]) for run in found["runs"]}
    chosen = [each for each in CONFIGURATIONS if options.match in each.name][: options.configurations]
    asked = [(each, i) for i in range(1, options.rounds + 1) for each in chosen]
    missing = [(c, i) for c, i in asked if (c.name, i) not in done]
    if missing:
        run_all(missing, found, options)
    print(f"{found['machine']}; {len(found['runs'])} runs\n")
    print("\n".join([*rows(found["runs"]), "", *groups(found["runs"]), ""]))
    measured = figures(found["runs"], found["failed"])
    print(table(measured))
    if options.check and any(each.missed for each in measured):
        sys.exit(1)


def run_all(missing: list[tuple[Configuration, int]], found: Json, options: argparse.Namespace) -> None:
    """Run the ``missing`` pairs (configuration, round), and add them to ``found`` and to the file of ``--json``."""
    kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=true")  # left by a call that was ended
    probe([word for each in options.probe for word in f"--{each}".split("=")])
    found["failed"] = []  # Failed pairs run again.
    found.setdefault("hardware", []).append([profile["status"] for profile in hardware()])
    kubectl("create", "namespace", NAMESPACE)
    forget(CONFIGURATIONS)
    began_s = time.monotonic()
    try:
        for i, (configuration, number) in enumerate(missing, 1):
            try:
                runs = pair(configuration, number, options.seconds, options.deadline)
                found["runs"] += runs
                text = "; ".join(f"predicted {1e3 * p:.2f} ms, measured {1e3 * m:.2f}" for p, m in map(times, runs))
            except (RuntimeError, TimeoutError, subprocess.SubprocessError) as problem:
                text = f"{problem} {getattr(problem, 'stderr', '') or ''}".strip()
                found["failed"].append(f"{configuration.name}, round {number}: {text}")
            if options.json:
                options.json.write_text(json.dumps(found))
            took_s = time.monotonic() - began_s
            left = f"{took_s:.0f} s, {took_s / i * (len(missing) - i):.0f} s left"
            print(f"{i}/{len(missing)} ({left}): {configuration.name}: {text}", file=sys.stderr, flush=True)
    finally:
        forget(CONFIGURATIONS)
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")


if __name__ == "__main__":
    main()
