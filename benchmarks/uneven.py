"""Uneven against even split on nodes of unlike speed: throughput of the same job, in interleaved pairs.

Needs a cluster with the operator and unlike nodes, such as

    hack/quickstart --name unlike --no-job -- \\
        --node device=cpu-fast,cpu=0.8 --node device=cpu-slow,cpu=0.2 --node device=cpu-slow,cpu=0.2
    KUBECONFIG=$(hack/cluster kubeconfig --name unlike) hack/env python benchmarks/uneven.py --ideal 2.0

``--ideal``: what the speeds of the nodes allow before communication: with quotas q, mean(q) / min(q), here 0.4 / 0.2.
Throughput is that of the last 50 steps. Profiles that earlier jobs taught are used as they are found.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import yaml


def kubectl(*args: str, stdin: str | None = None) -> str:
    return subprocess.run(
        ["kubectl", *args], input=stdin, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def trained(name: str, uneven: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Status of a job run to its end, and ``ranks`` of its last report; the job is deleted."""
    spec = {
        "model": {"name": "digits-cnn"},
        "dataset": {"name": "digits"},
        "globalBatchSize": options.batch,
        "steps": options.steps,
        "nodes": {"min": 3, "max": 3},
        "devices": options.devices.split(","),
        "collective": "Ring",
        "planning": {"uneven": uneven},
        "checkpoint": {"enabled": False},
    }
    job = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": {"name": name}, "spec": spec}
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(job))
    try:
        deadline = time.monotonic() + options.deadline
        while time.monotonic() < deadline:
            status: dict[str, Any] = json.loads(kubectl("get", "dljob", name, "-o", "json")).get("status", {})
            if status.get("phase") == "Complete":
                report = json.loads(kubectl("get", "configmap", f"{name}-report", "-o", "json"))["data"]
                return {**status, "ranks": json.loads(report["report.json"])["ranks"]}
            if status.get("phase") == "Failed":
                raise SystemExit(f"{name} failed: {status['conditions']}")
            time.sleep(0.5)
        raise SystemExit(f"{name}: not complete within {options.deadline:g} s")
    finally:
        kubectl("delete", "dljob", name, "--wait=true")
        while kubectl("get", "pods", "-l", f"dljob.dev/job={name}", "-o", "name").strip():
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=240)
    parser.add_argument("--devices", default="cpu-fast,cpu-slow")
    parser.add_argument("--ideal", type=float, default=2.0)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for one job")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pairs: list[dict[str, float]] = []
    for i in range(options.pairs):
        speeds: dict[str, float] = {}
        for kind in ("even", "uneven"):
            status = trained(f"{kind}-{i}", kind == "uneven", options)
            speeds[kind] = status["measured"]["samplesPerSecond"]
            ranks = status["ranks"]
            shares = "+".join(str(rank["share"]) for rank in ranks)
            busy = " ".join(f"{1e3 * rank['compute_s']:.1f}" for rank in ranks)
            text = f"pair {i + 1} {kind:6} {shares:>12}  {speeds[kind]:8.0f} samples/s   compute ms by rank: {busy}"
            print(text, file=sys.stderr, flush=True)
        pairs.append(speeds)
    ratios = [pair["uneven"] / pair["even"] for pair in pairs]
    found = {"machine": platform.platform(), "pairs": pairs, "ratio": statistics.median(ratios), "ideal": options.ideal}
    if options.json:
        print(json.dumps(found))
        return
    print(f"machine: {platform.platform()}")
    print(
        f"uneven over even: median {found['ratio']:.2f} of {len(ratios)} pairs, "
        f"{min(ratios):.2f} to {max(ratios):.2f}; "
        f"ideal before communication {options.ideal:.2f}"
    )


if __name__ == "__main__":
    main()
