"""Time how long generated DLJobs hold the operator: validation, planning and rendering of each.

    python -m benchmarks.planner.generated_jobs [--jobs 2000] [--seed 1] [--nodes 500]

The jobs are those of the property tests (``tests/support/manifests/generated_specs.py``): all fields, in and out of
their limits. Each is reconciled once on clusters of 0 to 4 nodes and on one with --nodes nodes of four types. A job's
time is the processor time of the whole reconcile, with the planning that the operator gives to another process, so that
a busy machine changes it little. The output has the median, the 99th percentile and the largest time, and the slowest
job.

Threshold: no job takes longer than a second on the small clusters.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import numpy as np
from benchmarks.lib.figures import machine
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView
from dljob.reconcile import reconcile
from support.builders import A100, CONFIG, CPUS, MIXED, NOW, T4, nodes, seen
from support.manifests.generated_specs import specs

BAR_S = 1.0
SMALL = {"cpu": CPUS, "mixed": MIXED, "one": nodes({"name": "one", "count": 1, "cpu": "300m"}), "none": ClusterView(())}


def large(count: int) -> ClusterView:
    """Return a cluster with ``count`` nodes of four types."""
    kinds: list[dict[str, Any]] = [
        {"name": "small", "cpu": 8, "memory": "32Gi"},
        {"name": "big", "cpu": 64, "memory": "256Gi"},
        {"name": "t4", "cpu": 16, "memory": "64Gi", "device": T4, "devices": 1, "bandwidth": "3.125G"},
        {"name": "a100", "cpu": 96, "memory": "1Ti", "device": A100, "devices": 8, "bandwidth": "12.5G"},
    ]
    return nodes(*({**kind, "count": count // len(kinds)} for kind in kinds))


def measured(jobs: int, number: int, views: dict[str, ClusterView]) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """Return the processor times in seconds of ``jobs`` generated jobs with their specs, by the name of the cluster."""
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {name: [] for name in views}

    @seed(number)
    @settings(
        max_examples=jobs,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(specs(), st.sampled_from(sorted(views)))
    def time_one(spec: dict[str, Any], name: str) -> None:
        observed = seen(spec, views[name])
        began = time.process_time()
        reconcile(observed, CONFIG, NOW)
        found[name].append((time.process_time() - began, spec))

    time_one()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000, help="number of generated jobs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generator (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=500, help="nodes of the large cluster (default: %(default)s)")
    options = parser.parse_args()
    print(f"{options.jobs} jobs, seed {options.seed}; {machine()}\n")
    print("| cluster | jobs | median, ms | 99 %, ms | largest, ms |\n|---|---|---|---|---|")
    found = measured(options.jobs, options.seed, {**SMALL, f"{options.nodes} nodes": large(options.nodes)})
    for name, times in found.items():
        ms = 1e3 * np.array([spent for spent, _ in times])
        print(f"| {name} | {len(ms)} | {np.median(ms):.1f} | {np.percentile(ms, 99):.1f} | {ms.max():.1f} |")
    slowest_s, spec = max((max(times, key=lambda each: each[0]) for times in found.values()), key=lambda each: each[0])
    worst_s = max(spent for name in SMALL for spent, _ in found[name])
    print(f"\nlargest time on the small clusters {worst_s:.2f} s, threshold ≤ {BAR_S:g}: ", end="")
    print("met" if worst_s <= BAR_S else "MISSED")
    print(f"slowest job, {slowest_s:.2f} s: {json.dumps(spec)[:2000]}")


if __name__ == "__main__":
    main()
