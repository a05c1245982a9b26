"""Run jobs on the embedded cluster through random faults, and check that all complete and nothing is left behind.

    python -m benchmarks.cluster.chaos [--faults 300] [--seed 1] [--state FILE] [--name CLUSTER]

The cluster must have been set up by ``hack/quickstart --no-job``. Its operator is stopped for the time of the run. Two
operators run here instead, each behind a proxy that disturbs its requests. A few jobs run at once; one that completes
is checked, deleted and replaced. Faults (``tests/support/chaos``) are drawn from the seed, one after another, and last
up to ``HOLD_S``. After a break, the same command with the same ``--state`` goes on where it stopped.

The output has the number of faults of each kind, of jobs that completed and of their restarts, and what was wrong. The
exit code is 1 if anything was.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from devcluster.embedded.packages import install
from devcluster.embedded.state import State
from devcluster.paths import cluster_dir
from devcluster.progress import Progress
from support.chaos.cluster_faults import Operators, Place, draw
from support.chaos.faulty_api import FaultyApi
from support.chaos.watcher import Watcher, none_left, orphans
from support.cluster.kubectl import Kubectl, KubectlError, condition, example, wait_for
from support.cluster.operator_process import OperatorProcess

Json = dict[str, Any]
SYSTEM, NAMESPACE = "dljob-system", "chaos"
HOLD_S, PAUSE_S = (2.0, 15.0), (1.0, 8.0)
"""Least and most seconds that a fault lasts, and between two faults."""
COMPLETES_S = 600
"""Time limit for each job that still runs after the last fault."""
ACCURACY = 0.97
KINDS: tuple[Json, ...] = (
    {"nodes": {"min": 3, "max": 3}, "epochs": 150},
    {"nodes": {"min": 2, "max": 2}, "epochs": 100},
    {"nodes": {"min": 1, "max": 2}, "epochs": 100},
)
"""Changes of examples/digits.yaml for the jobs that run at the same time."""


@dataclass
class Progressed:
    """What has happened so far, as stored in the file of ``--state``."""

    seed: int
    faults: list[str] = field(default_factory=list)
    complete: int = 0
    restarts: int = 0
    wrong: list[str] = field(default_factory=list)
    exits: int = 0
    """Times that an operator ended by itself and was started again, as the kubelet does."""
    made: int = 0
    """Jobs created so far; the last ones still run."""

    @classmethod
    def read(cls, path: Path, seed: int) -> "Progressed":
        found = cls(**json.loads(path.read_text())) if path.exists() else cls(seed)
        if found.seed != seed:
            raise SystemExit(f"--state: found a run with seed {found.seed}; expected {seed}. Choose another file")
        return found

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(path)


@contextmanager
def operators(kubectl: Kubectl, folder: Path, seed: int, count: int = 2) -> Iterator[Operators]:
    """Stop the operator of the cluster and run ``count`` local ones. Restore the cluster's operator at the end."""
    system = Kubectl(kubectl.kubeconfig, SYSTEM)
    [deployment] = system.list("deployments", "app.kubernetes.io/name=dljob")
    name, variables = deployment["metadata"]["name"], deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    env = {item["name"]: item["value"] for item in variables if "value" in item}
    preload, clocks, proxies, processes = _faketime(), [], [], []
    system.run("scale", "deployment", name, "--replicas=0")
    wait_for("the operator to stop", lambda: not system.list("pods", "app.kubernetes.io/name=dljob"), 60)
    try:
        for i in range(count):
            own = folder / f"operator-{i}"
            own.mkdir()
            proxies.append(FaultyApi(kubectl.kubeconfig, own, seed + i))
            proxies[-1].start()
            clocks.append(own / "clock")
            clocks[-1].write_text("+0\n")
            clock = {
                "LD_PRELOAD": preload, "FAKETIME_TIMESTAMP_FILE": str(clocks[-1]), "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }  # fmt: skip
            # Nodes that fail again and again would be left out, and three of them are all there are.
            own_env = {"DLJOB_TRAINER_IMAGE": env["DLJOB_TRAINER_IMAGE"], "DLJOB_NODE_FAULTS": "0"}
            processes.append(
                OperatorProcess(
                    str(proxies[-1].kubeconfig),
                    NAMESPACE,
                    folder / f"operator-{i}.log",
                    f"chaos-{i}",
                    **clock,
                    **own_env,
                )
            )
            processes[-1].start()
        yield Operators(tuple(processes), tuple(proxies), tuple(clocks))
    finally:
        for each in processes:
            each.kill()
        for proxy in proxies:
            proxy.stop()
        system.run("scale", "deployment", name, f"--replicas={deployment['spec']['replicas']}")


def _faketime() -> str:
    """Return the path of libfaketime, which is installed if it is missing."""
    [path] = [f"/usr/lib/{os.uname().machine}-linux-gnu/faketime/libfaketimeMT.so.1"]
    install({path: "libfaketime"}, Progress())
    return path


class Jobs:
    """The jobs that run at the same time. One that ends is checked, deleted and replaced by another."""

    def __init__(self, kubectl: Kubectl, watcher: Watcher, so_far: Progressed) -> None:
        self._kubectl, self._watcher, self._so_far = kubectl, watcher, so_far

    def tend(self, *, replace: bool, check: bool = True) -> list[str]:
        """Check ended jobs and delete them. Return the names of those that have not ended.

        ``replace``: create new ones in their place. ``check``: False while a fault lasts, which may keep the operators
        from writing the events of a job's end. Jobs that ended wait for their check until it is over.
        """
        left = []
        for job in self._kubectl.list("dljobs"):
            name = job["metadata"]["name"]
            if "deletionTimestamp" in job["metadata"]:
                continue
            if condition(job, "Complete") or condition(job, "Failed"):
                if check:
                    self._ended(name, job)
            else:
                left.append(name)
        while replace and len(left) < len(KINDS):
            kinds = {int(name.split("-")[1]) for name in left}
            kind = next(i for i in range(len(KINDS)) if i not in kinds)
            name = f"job-{kind}-{self._so_far.made}"
            self._so_far.made += 1
            policy = {"backoffLimit": 1000}
            self._kubectl.apply(example("digits.yaml", job=name, runPolicy=policy, **KINDS[kind]))
            left.append(name)
        return left

    def _ended(self, name: str, job: Json) -> None:
        status = job["status"]
        accuracy = (status.get("result") or {}).get("accuracy") or 0.0
        uid, so_far = job["metadata"]["uid"], self._so_far
        if not is_complete(job):
            so_far.wrong.append(f"{name} is {status.get('phase')}: {json.dumps(status.get('conditions'))[:2000]}")
        elif accuracy < ACCURACY:
            so_far.wrong.append(f"{name}: accuracy {accuracy:.3f}, expected at least {ACCURACY}")
        else:
            so_far.complete += 1
        so_far.restarts += status.get("restarts", 0)
        try:
            wait_for("events", lambda: uid not in self._watcher.missing_events(), 30)
        except AssertionError:
            so_far.wrong.append(f"{name}: no event of {sorted(self._watcher.missing_events()[uid])}")
        self._kubectl.delete("dljob", name, "--wait=false")
        print(
            f"{name}: {status.get('phase')}, accuracy {accuracy:.3f}, {status.get('restarts', 0)} restarts",
            file=sys.stderr,
        )


def is_complete(job: Json) -> bool:
    found = condition(job, "Complete")
    return found is not None and found["status"] == "True"


def strike(place: Place, jobs: Jobs, so_far: Progressed) -> None:
    """Inject the next fault, keep it for a while, and take it away."""
    number = len(so_far.faults)
    name, fault, random = draw(so_far.seed, number)
    began = time.monotonic()
    with fault(place, random) as what:
        print(f"{number + 1}: {name} ({what})", file=sys.stderr, flush=True)
        _until(began + random.uniform(*HOLD_S), jobs, usable=not name.startswith("control plane"), check=False)
    so_far.faults.append(name)
    for process in place.operators.processes:
        if not process.running:
            so_far.exits += 1
            process.start(ready=False)
    _until(time.monotonic() + random.uniform(*PAUSE_S), jobs, usable=True)


def _until(deadline_s: float, jobs: Jobs, *, usable: bool, check: bool = True) -> None:
    """Tend the jobs until a deadline. ``usable``: False if the API server does not answer for now."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if usable:
            with_retries(jobs, check=check)
        time.sleep(min(1.0, max(0.0, left_s)))


def with_retries(jobs: Jobs, *, check: bool) -> None:
    try:
        jobs.tend(replace=True, check=check)
    except KubectlError as error:
        print(f"kubectl: {error}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="file with the progress, for going on after a break")
    parser.add_argument("--name", default=os.environ.get("DLJOB_CLUSTER", "dev"), help="name of the cluster (dev)")
    given = parser.parse_args()
    state = State(cluster_dir(given.name), given.name)
    if not state.kubeconfig.exists():
        raise SystemExit(
            f"--name: found no embedded cluster {given.name!r}; expected one. Run hack/quickstart --no-job"
        )
    folder = Path(tempfile.mkdtemp(prefix="dljob-chaos-"))
    path = given.state or folder / "state.json"
    so_far = Progressed.read(path, given.seed)
    kubectl = Kubectl(str(state.kubeconfig), NAMESPACE)
    if not Kubectl(kubectl.kubeconfig).get("namespace", NAMESPACE):
        kubectl.run("create", "namespace", NAMESPACE)
    began = time.monotonic()
    watcher = Watcher(kubectl)
    watcher.start()
    jobs = Jobs(kubectl, watcher, so_far)
    print(f"logs of the operators: {folder}", file=sys.stderr)
    with operators(kubectl, folder, given.seed) as running:
        place = Place(kubectl, given.name, state, running)
        while len(so_far.faults) < given.faults:
            strike(place, jobs, so_far)
            so_far.write(path)
        try:
            wait_for("all jobs to complete", lambda: not jobs.tend(replace=False), COMPLETES_S)
            none_left(kubectl, 120)
        except AssertionError as error:
            so_far.wrong.append(str(error))
            so_far.wrong += [f"left: {each}" for each in orphans(kubectl)]
        watcher.stop()
        so_far.wrong += watcher.violations
        so_far.write(path)
    kubectl.run("delete", "namespace", NAMESPACE, "--wait=false")
    result = {
        "seed": so_far.seed, "faults": dict(sorted(Counter(so_far.faults).items())), "complete": so_far.complete,
        "restarts": so_far.restarts, "operator_exits": so_far.exits,
        "minutes": round((time.monotonic() - began) / 60, 1), "wrong": so_far.wrong,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    return 1 if so_far.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
