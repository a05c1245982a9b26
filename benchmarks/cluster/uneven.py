"""Throughput of uneven and even local batch sizes on heterogeneous nodes, in interleaved pairs of the same job.

It needs a cluster with the operator and nodes of different speeds, such as

    hack/quickstart --name unlike --no-job -- \\
        --node device=cpu-fast,cpu=0.8 --node device=cpu-slow,cpu=0.2 --node device=cpu-slow,cpu=0.2
    KUBECONFIG=$(hack/cluster kubeconfig --name unlike) hack/env python -m benchmarks.cluster.uneven --ideal 2.0

``--ideal``: what the speeds of the nodes allow before communication: with quotas q, mean(q) / min(q), here 0.4 / 0.2.
Throughput is that of the last 50 steps. Profiles that earlier jobs taught are used as they are found. The optimum is
what the best split of the batch gives by the speeds that all jobs' ranks probed before their first step, without
communication, and with what it took the uneven jobs' last ranks, who wait for nobody else. Of the time in which ranks
wait and communicate, the part is shown that they spend on a CPU.
"""

import argparse
import json
import platform
import statistics
import sys
from collections import defaultdict
from typing import Any

from benchmarks.cluster.jobs import applied, kubectl

from dltrain.batch.shares import balanced, fit


def trained(name: str, uneven: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Status of a job run to its end, and ``ranks`` and ``probes`` of its last report; the job is deleted."""
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
        last = json.loads(report["report.json"])
        return {**status, "ranks": last["ranks"], "probes": last["probes"]}


def optimum(probes: list[dict[str, Any]], devices: list[str], batch: int) -> float:
    """Samples per second of a rank on each of ``devices``, with the best split and nothing but computing."""
    timings: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for probe in probes:
        timings[probe["device"]][probe["batch"]].append(probe["compute_s"])
    lines = {d: fit([(size, statistics.median(s)) for size, s in of.items()]) for d, of in timings.items()}
    speeds = [lines[device] for device in devices]
    shares = balanced(speeds, batch)
    return batch / max(speed.step_s(share) for speed, share in zip(speeds, shares, strict=True))


def waiting_cpu(ranks: list[dict[str, Any]]) -> str:
    """CPU time over time of waiting and communicating, by rank."""
    parts = (rank["wait_cpu_s"] / max(rank["wait_s"] + rank["comm_s"], 1e-9) for rank in ranks)
    return " ".join(f"{part:.0%}" for part in parts)


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
    probes: list[dict[str, Any]] = []
    talking_s: list[float] = []
    for i in range(options.pairs):
        speeds: dict[str, float] = {}
        for kind in ("even", "uneven"):
            status = trained(f"{kind}-{i}", kind == "uneven", options)
            speeds[kind] = status["measured"]["samplesPerSecond"]
            ranks = status["ranks"]
            probes += status["probes"]
            shares = "+".join(str(rank["share"]) for rank in ranks)
            busy = " ".join(f"{1e3 * rank['compute_s']:.1f}" for rank in ranks)
            text = f"pair {i + 1} {kind:6} {shares:>12}  {speeds[kind]:8.0f} samples/s   compute ms by rank: {busy}"
            print(f"{text}   waiting on CPU: {waiting_cpu(ranks)}", file=sys.stderr, flush=True)
        pairs.append(speeds)
        talking_s.append(min(rank["comm_s"] for rank in ranks))
    ratios = [pair["uneven"] / pair["even"] for pair in pairs]
    best = optimum(probes, [rank["device"] for rank in ranks], options.batch)
    reached = statistics.median(pair["uneven"] for pair in pairs)
    talking = options.batch / (options.batch / best + statistics.median(talking_s))
    found = {
        "machine": platform.platform(),
        "pairs": pairs,
        "ratio": statistics.median(ratios),
        "ideal": options.ideal,
        "optimum_samples_per_s": best,
        "of_optimum": reached / best,
        "of_optimum_with_communication": reached / talking,
    }
    if options.json:
        print(json.dumps(found))
        return
    print(f"machine: {platform.platform()}")
    print(
        f"uneven over even: median {found['ratio']:.2f} of {len(ratios)} pairs, "
        f"{min(ratios):.2f} to {max(ratios):.2f}; "
        f"ideal before communication {options.ideal:.2f}\n"
        f"uneven: {found['of_optimum']:.2f} of the optimum for the speeds probed, {best:.0f} samples/s; "
        f"{found['of_optimum_with_communication']:.2f} with communication, {talking:.0f} samples/s"
    )


if __name__ == "__main__":
    main()
