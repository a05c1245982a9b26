"""Measure the time from `kubectl apply` to the first training step by part, on a real cluster.

Run after hack/quickstart (images present, operator installed):

    KUBECONFIG=$(hack/cluster kubeconfig) hack/env python -m benchmarks.cluster.startup --runs 5

Each run applies a new copy of the job, waits for its first step, reads ``status.startup`` and deletes the job. The
total is compared with a lower bound measured in the same run: the time to start as many interpreters as the job has
ranks at once and import torch in them.
"""

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from benchmarks.cluster.jobs import applied

PARTS = ("admissionSeconds", "podsSeconds", "rendezvousSeconds", "importSeconds", "firstStepSeconds", "totalSeconds")


def started(manifest: dict[str, Any], deadline_s: float) -> dict[str, float]:
    """Apply the job, wait for its first step and delete it. Return seconds by part, and ``wallSeconds``."""
    began = time.monotonic()
    with applied(manifest, deadline_s, poll_s=0.1) as statuses:
        status = next(status for status in statuses if (status.get("startup") or {}).get("totalSeconds") is not None)
        return {**status["startup"], "wallSeconds": time.monotonic() - began}


def imports_s(ranks: int) -> float:
    """Return the seconds until ``ranks`` interpreters, started together, have imported torch on this machine."""
    began = time.monotonic()
    processes = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(ranks)]
    for process in processes:
        process.wait()
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=Path(__file__).resolve().parents[2] / "examples" / "digits.yaml")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for one start")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    job = next(d for d in yaml.safe_load_all(options.job.read_text()) if d["kind"] == "DLJob")
    job["spec"]["checkpoint"] = {**job["spec"].get("checkpoint", {}), "enabled": False}
    runs: list[dict[str, float]] = []
    for i in range(options.runs):
        copy_of_job = copy.deepcopy(job)
        copy_of_job["metadata"]["name"] = f"startup-{i}"
        runs.append(started(copy_of_job, options.deadline))
        print(f"run {i + 1}/{options.runs}: {runs[-1]['wallSeconds']:.1f} s", file=sys.stderr, flush=True)
    medians = {part: statistics.median(r.get(part) or 0.0 for r in runs) for part in (*PARTS, "wallSeconds")}
    bound = statistics.median(imports_s(3) for _ in range(3))
    if options.json:
        print(json.dumps({"machine": platform.platform(), "runs": runs, "median": medians, "importsSeconds": bound}))
        return
    print(f"machine: {platform.processor() or platform.machine()}, {platform.platform()}")
    for part in (*PARTS, "wallSeconds"):
        spread = [r.get(part) or 0.0 for r in runs]
        print(f"{part:20} median {medians[part]:6.2f} s   min {min(spread):6.2f}   max {max(spread):6.2f}")
    print(f"{'three torch imports':20} median {bound:6.2f} s   (bound, this machine, same run)")


if __name__ == "__main__":
    main()
