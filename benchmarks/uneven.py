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
import sys
from typing import Any

from jobs import applied, kubectl


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
    with applied(job, options.deadline, poll_s=0.5) as statuses:
        status = next(status for status in statuses if status.get("phase") == "Complete")
        report = json.loads(kubectl("get", "configmap", f"{name}-report", "-o", "json"))["data"]
        return {**status, "ranks": json.loads(report["report.json"])["ranks"]}


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
