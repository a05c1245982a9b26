"""Compare the throughput of uneven and even local batch sizes on heterogeneous nodes, in interleaved runs of one job.

The benchmark needs a cluster with the operator and nodes of different speeds, such as

    hack/quickstart --name mixed --no-job -- \\
        --node device=cpu-fast,cpu=0.8 --node device=cpu-slow,cpu=0.2 --node device=cpu-slow,cpu=0.2
    KUBECONFIG=$(hack/cluster kubeconfig --name mixed) hack/env python -m benchmarks.cluster.uneven --ideal 2.0

``--ideal``: the speedup without communication that the node speeds allow; with quotas q it is mean(q) / min(q), here
0.4 / 0.2. Throughput is that of the last 50 steps. Existing profiles are used. The optimum is the throughput of the
best split of the batch for the speeds that the ranks probed before their first step. It is printed without
communication, and with the communication time of the slowest rank of the uneven jobs, which waits for no other rank.
The table also shows the CPU use while ranks wait and communicate.
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
    """Run a job to its end and delete it. Return its status with ``ranks`` and ``probes`` of its last report."""
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
    """Return the samples per second of one rank per device with the best split, without communication."""
    timings: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for probe in probes:
        timings[probe["device"]][probe["batch"]].append(probe["compute_s"])
    lines = {d: fit([(size, statistics.median(s)) for size, s in of.items()]) for d, of in timings.items()}
    speeds = [lines[device] for device in devices]
    shares = balanced(speeds, batch)
    return batch / max(speed.step_s(share) for speed, share in zip(speeds, shares, strict=True))


def waiting_cpu(ranks: list[dict[str, Any]]) -> str:
    """Return CPU time divided by the time of waiting and communicating, by rank."""
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
    communication_s: list[float] = []
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
        communication_s.append(min(rank["comm_s"] for rank in ranks))
    ratios = [pair["uneven"] / pair["even"] for pair in pairs]
    best = optimum(probes, [rank["device"] for rank in ranks], options.batch)
    reached = statistics.median(pair["uneven"] for pair in pairs)
    with_communication = options.batch / (options.batch / best + statistics.median(communication_s))
    result = {
        "machine": platform.platform(),
        "pairs": pairs,
        "ratio": statistics.median(ratios),
        "ideal": options.ideal,
        "optimum_samples_per_s": best,
        "of_optimum": reached / best,
        "of_optimum_with_communication": reached / with_communication,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"machine: {platform.platform()}")
    print(
        f"uneven over even: median {result['ratio']:.2f} of {len(ratios)} pairs, "
        f"{min(ratios):.2f} to {max(ratios):.2f}; "
        f"ideal before communication {options.ideal:.2f}\n"
        f"uneven: {result['of_optimum']:.2f} of the optimum for the speeds probed, {best:.0f} samples/s; "
        f"{result['of_optimum_with_communication']:.2f} with communication, {with_communication:.0f} samples/s"
    )


if __name__ == "__main__":
    main()
