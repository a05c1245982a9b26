"""Run many small jobs at the same time on a real cluster, and compare with jobs that run one after another.

Run after ``hack/quickstart --no-job`` (images present, operator installed):

    KUBECONFIG=$(hack/cluster kubeconfig) hack/env python -m benchmarks.cluster.many_jobs --jobs 60 --check

All jobs are created at once. They are real: in each, a tiny model learns scikit-learn's digits for a few epochs. The
cluster decides how many run at the same time; the others wait. The goals are: all Complete, none restarted or
failed, no restart of the operator, a status of each job within 10 s, and a total time of at most 1.3 times that of
running the jobs one after another at the best width.

That time is an estimate: first, ``--alone`` jobs run one after another for each width of ``--widths`` (nodes per job).
The width with the least mean time is the best one, and its mean times ``--jobs`` is the estimate. It has to be an
estimate, because 60 jobs one after another take longer than anybody waits.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import datetime
from typing import Any

from benchmarks.cluster.jobs import kubectl
from benchmarks.lib.goals import Figure, table

Json = dict[str, Any]
SELECTOR = "dljob.dev/benchmark=many-jobs"
OPERATOR = "app.kubernetes.io/name=dljob"
POLL_S = 1.0
ENDED = ("Complete", "Failed")


def manifest(name: str, width: int, epochs: int) -> Json:
    """Return a small job of ``width`` nodes that stores nothing."""
    label, _, value = SELECTOR.partition("=")
    spec = {
        "model": {"name": "mlp"},
        "dataset": {"name": "digits"},
        "globalBatchSize": 60,
        "epochs": epochs,
        "nodes": {"min": width, "max": width},
        "resources": {"cpu": "500m", "memory": "1Gi"},
        "checkpoint": {"enabled": False},
    }
    metadata = {"name": name, "labels": {label: value}}
    return {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": metadata, "spec": spec}


def create(manifests: list[Json]) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))


def jobs() -> dict[str, Json]:
    items = json.loads(kubectl("get", "dljobs", "-l", SELECTOR, "-o", "json"))["items"]
    return {item["metadata"]["name"]: item for item in items}


def clear() -> None:
    """Delete all jobs of this benchmark, and wait until their pods are gone."""
    kubectl("delete", "dljobs", "-l", SELECTOR, "--wait=true")
    while any(
        "dljob.dev/job" in pod["metadata"].get("labels", {})
        and pod["metadata"]["labels"]["dljob.dev/job"].startswith(("many-", "alone-"))
        for pod in json.loads(kubectl("get", "pods", "-o", "json"))["items"]
    ):
        time.sleep(POLL_S)


def until_ended(names: list[str], deadline_s: float, first_status_s: dict[str, float] | None = None) -> dict[str, Json]:
    """Wait until all jobs are Complete or Failed, and return them. Record when each status was seen first."""
    began_s = time.monotonic()
    while True:
        found = jobs()
        now_s = time.monotonic() - began_s
        for name in names:
            if first_status_s is not None and (found[name].get("status") or {}).get("conditions"):
                first_status_s.setdefault(name, now_s)
        left = [name for name in names if (found[name].get("status") or {}).get("phase") not in ENDED]
        if not left:
            return found
        if now_s > deadline_s:
            raise SystemExit(f"found {len(left)} jobs not ended after {deadline_s:g} s, such as {left[0]}: "
                             f"{json.dumps(found[left[0]].get('status'))[:1000]}")  # fmt: skip
        time.sleep(POLL_S)


def alone_s(width: int, count: int, epochs: int, deadline_s: float) -> float:
    """Run jobs of ``width`` nodes one after another. Return the mean seconds from one's creation to the next one's."""
    began_s = time.monotonic()
    for i in range(count):
        name = f"alone-{width}-{i}"
        create([manifest(name, width, epochs)])
        ended = until_ended([name], deadline_s)
        if ended[name]["status"]["phase"] != "Complete":
            raise SystemExit(f"{name} failed: {ended[name]['status']['conditions']}")
    took_s = (time.monotonic() - began_s) / count
    clear()
    return took_s


def operator_pods() -> list[Json]:
    items: list[Json] = json.loads(kubectl("get", "pods", "-A", "-l", OPERATOR, "-o", "json"))["items"]
    return items


def operator_restarts() -> int:
    return sum(each["restartCount"] for pod in operator_pods() for each in pod["status"].get("containerStatuses", []))


def explain_restarts() -> None:
    """Print how the operator's last container ended, its last lines and the events of its pod."""
    for pod in operator_pods():
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        for each in pod["status"].get("containerStatuses", []):
            if each["restartCount"]:
                print(f"{name}: {json.dumps(each['lastState'])}", file=sys.stderr)
                print(kubectl("logs", "-n", namespace, name, "--previous", "--tail=30"), file=sys.stderr)
        events = kubectl("get", "events", "-n", namespace, "--field-selector", f"involvedObject.name={name}")
        print(events, file=sys.stderr)


def most_at_once(ended: list[Json]) -> int:
    """Return how many jobs ran at the same time at most, from the times in their status."""
    changes = []
    for job in ended:
        times = [job["status"].get("startTime"), job["status"].get("completionTime")]
        if all(times):
            changes += [(datetime.fromisoformat(at), step) for at, step in zip(times, (1, -1), strict=True)]
    most = running = 0
    for _, step in sorted(changes):
        running += step
        most = max(most, running)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--alone", type=int, default=3, help="jobs that run one after another, for each width")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds for all jobs together")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    clear()
    alone = {width: alone_s(width, options.alone, options.epochs, 180) for width in options.widths}
    best = min(alone, key=lambda width: alone[width])
    print(f"one after another: {', '.join(f'{s:.1f} s a job on {w} nodes' for w, s in alone.items())}", file=sys.stderr)
    restarts = operator_restarts()
    names = [f"many-{i}" for i in range(options.jobs)]
    first_status_s: dict[str, float] = {}
    began_s = time.monotonic()
    create([manifest(name, 1, options.epochs) for name in names])
    ended = list(until_ended(names, options.deadline, first_status_s).values())
    took_s = time.monotonic() - began_s
    restarts = operator_restarts() - restarts
    figures = [
        Figure("jobs Complete", sum(job["status"]["phase"] == "Complete" for job in ended), low=options.jobs),
        Figure("restarts of jobs", sum(job["status"].get("restarts", 0) for job in ended), high=0),
        Figure("restarts of the operator", restarts, high=0),
        Figure("creation of all to the last first status", max(first_status_s.values()), "s", high=10),
        Figure("total time", took_s, "s"),
        Figure("one after another, estimated", alone[best] * options.jobs, "s"),
        Figure("total time / one after another", took_s / (alone[best] * options.jobs), high=1.3),
        Figure("jobs at the same time, most", most_at_once(ended)),
        Figure("completion, median after creation", statistics.median(_seconds(job) for job in ended), "s"),
    ]
    print(f"{options.jobs} jobs; {platform.platform()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print(table(figures))
    for job in ended:
        if job["status"]["phase"] == "Failed":
            print(f"{job['metadata']['name']}: {job['status']['conditions']}", file=sys.stderr)
    if restarts:
        explain_restarts()
    missed = any(each.missed for each in figures)
    if not missed:
        clear()
    if options.check and missed:
        sys.exit(1)


def _seconds(job: Json) -> float:
    """Return the seconds from the creation to the completion of a job."""
    ended = job["status"].get("completionTime")
    created = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    return (datetime.fromisoformat(ended) - created).total_seconds() if ended else float("nan")


if __name__ == "__main__":
    main()
