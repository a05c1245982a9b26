"""Measure the planner's time and memory on clusters of 10 to 10,000 nodes with eight device types.

    python -m benchmarks.planner.duration [--json] [--check]

For each size, ten jobs are planned on nodes with different numbers of free devices: a large model, a small one, one
that minimizes energy within a deadline, the large one with measured step times on several devices of every type, and
two with ``strategy: Auto``, which adds ZeRO-1, pipeline and tensor parallelism. Four have ``precision: Auto``: two with
strategy Data and two with Auto, one of each with ``activationCheckpointing: Auto``. All of them also ask for better
plans that the trainer cannot run yet, as ``dljob plan`` does. Each job's time is the best of several repeats; the
output has the maximum over jobs in wall-clock and CPU time, and in CPU time those of the jobs with strategy Auto and
with precision Auto.
Memory is the peak that planning allocates, not counting the nodes. ``--check`` fails (exit code 1) if both times are
above 200 ms for 1,000 nodes or 1 s for 10,000 (a busy machine extends one, numpy's threads the other), or if memory is
above 200 MB.
"""

import argparse
import json
import sys
import time
import tracemalloc
from dataclasses import replace

from dljob.calibrate import Learned, LearnedPoint, Place, StepPoint
from dljob.cluster import ClusterView, Node
from dljob.planner import Decision, Request, plan

GPUS = (
    "NVIDIA-A100-SXM4-40GB",
    "Tesla-T4",
    "Tesla-V100-SXM2-16GB",
    "NVIDIA-H100-80GB-HBM3",
    "NVIDIA-L4",
    "NVIDIA-A10",
    "NVIDIA-A30",
)
LARGE = Request(
    job="large",
    global_batch=4096,
    total_steps=100_000,
    model="resnet50",
    dataset="synthetic-images",
    candidates_kept=100,
    asks_unsupported=True,
)
JOBS = (
    LARGE,
    replace(LARGE, job="small", global_batch=96, total_steps=375, model="digits-cnn", dataset="digits"),
    replace(LARGE, job="frugal", minimize="Energy", deadline_s=8 * 3600.0),
)
MEASURED = {
    ("resnet50", device): Learned(
        tuple(LearnedPoint(b, 0.01 + 0.001 * b, 50) for b in (8, 32, 128, 512)),
        steps=tuple(StepPoint(Place(n, k), 32, 0.05 + 0.01 * n) for n, k in ((1, 2), (2, 1), (4, 4), (8, 1), (16, 8))),
    )
    for device in (*GPUS, "cpu")
}
AUTO_STRATEGY = (
    replace(LARGE, job="open", strategy="Auto"),
    replace(LARGE, job="open-tokens", strategy="Auto", model="gpt-mini", dataset="synthetic-tokens"),
)
AUTO_PRECISION = (
    replace(LARGE, job="any-precision", precision=None),
    replace(AUTO_STRATEGY[0], job="any-precision-open", precision=None),
    replace(AUTO_STRATEGY[1], job="any-precision-tokens", precision=None, recomputation="Auto", strategy="Data"),
    replace(AUTO_STRATEGY[1], job="any-precision-open-tokens", precision=None, recomputation="Auto"),
)
CASES = (
    *((job, {}) for job in (*JOBS, *AUTO_STRATEGY, *AUTO_PRECISION)),
    (replace(LARGE, job="measured"), MEASURED),
)
SIZES = (10, 100, 1_000, 10_000)
LIMIT_S = {1_000: 0.2, 10_000: 1.0}
LIMIT_NBYTES = 200e6


def cluster(nodes: int) -> ClusterView:
    """Return a cluster with eight device types in equal parts. GPU nodes have 1 to 8 of their 8 devices free."""

    def node(i: int) -> Node:
        kind = i % 8
        if kind == 7:
            return Node(f"n{i}", "cpu", cpu=32, free_cpu=30, free_memory_nbytes=2**36)
        free = 1 + (i // 8) % 8
        return Node(f"n{i}", GPUS[kind], 8, free, cpu=64, free_cpu=60, free_memory_nbytes=2**38, is_gpu=True)

    return ClusterView(tuple(map(node, range(nodes))))


def measure(nodes: int, repeats: int) -> dict[str, float]:
    view = cluster(nodes)
    worst_s, worst_cpu_s, considered = 0.0, 0.0, 0
    cpu_s = dict[str, float]()
    for job, profiles in CASES:
        walls, cpus = [], []
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            found = plan(job, view, profiles)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        assert isinstance(found, Decision), found
        worst_s, worst_cpu_s = max(worst_s, min(walls)), max(worst_cpu_s, min(cpus))
        cpu_s[job.job] = min(cpus)
        considered = max(considered, len(found.candidates))
    tracemalloc.start()
    for job, profiles in CASES:
        plan(job, view, profiles)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "nodes": nodes,
        "plan_s": worst_s,
        "cpu_s": worst_cpu_s,
        "open_s": max(cpu_s[job.job] for job in AUTO_STRATEGY),
        "precision_s": max(cpu_s[job.job] for job in AUTO_PRECISION),
        "peak_nbytes": peak,
        "candidates": considered,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    plan(JOBS[0], cluster(10), {})  # exclude the time of imports and of filling caches
    rows = [measure(nodes, options.repeats) for nodes in SIZES]
    if options.json:
        print(json.dumps(rows))
    else:
        names = ("wall", "CPU", "strategy", "precision", "memory")
        print(f"{'nodes':>7} {' '.join(f'{name:>10}' for name in names)} {'candidates':>11}")
        for row in rows:
            print(
                f"{row['nodes']:7.0f} {1e3 * row['plan_s']:7.1f} ms {1e3 * row['cpu_s']:7.1f} ms "
                f"{1e3 * row['open_s']:7.1f} ms {1e3 * row['precision_s']:7.1f} ms "
                f"{row['peak_nbytes'] / 1e6:7.1f} MB {row['candidates']:11.0f}"
            )
    slow = [
        r
        for r in rows
        if min(r["plan_s"], r["cpu_s"]) > LIMIT_S.get(int(r["nodes"]), 9e9) or r["peak_nbytes"] > LIMIT_NBYTES
    ]
    for row in slow if options.check else ():
        print(f"{row['nodes']:.0f} nodes: over the limit", file=sys.stderr)
    return 1 if options.check and slow else 0


if __name__ == "__main__":
    sys.exit(main())
