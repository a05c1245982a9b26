"""Measure hack/quickstart on a new cluster: its time, and the first prediction for its job against the measured step.

    hack/env python -m benchmarks.predictions.quickstart --rounds 3

Each round deletes the development cluster ``--name``, runs ``hack/quickstart`` with hardware probes, as a user would,
and reads the job's status. The cache must be filled: the first run of ``hack/quickstart`` builds Kubernetes and images.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cluster.jobs import kubectl
from benchmarks.lib.goals import Figure, table

JOB = "digits"
LIMIT_S = 600.0
HACK = Path(__file__).resolve().parents[2] / "hack"


def hack(program: str, *words: str) -> str:
    """Run a program of the folder ``hack``, and return what it prints."""
    done = subprocess.run([HACK / program, *words], check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    return done.stdout.strip()


def rounds(name: str, count: int) -> list[dict[str, float]]:
    """Return for each round the seconds of hack/quickstart, and the predicted and measured seconds of a step."""
    found = []
    for number in range(1, count + 1):
        hack("cluster", "down", "--name", name, "--quiet")
        began = time.monotonic()
        hack("quickstart", "--name", name)
        took_s = time.monotonic() - began
        os.environ["KUBECONFIG"] = hack("cluster", "kubeconfig", "--name", name)
        status = json.loads(kubectl("get", "dljob", JOB, "-o", "json"))["status"]
        step = {"predicted": status["plan"]["predicted"]["stepSeconds"], "measured": status["measured"]["stepSeconds"]}
        found.append({"seconds": took_s, **step})
        print(f"round {number}/{count}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="quickstart-benchmark", help="development cluster, which is deleted")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = rounds(options.name, options.rounds)
    hack("cluster", "down", "--name", options.name, "--quiet")
    errors = [100 * abs(one["predicted"] / one["measured"] - 1) for one in found]
    figures = [
        Figure("hack/quickstart, median", statistics.median(one["seconds"] for one in found), "s", high=45),
        Figure("hack/quickstart, slowest", max(one["seconds"] for one in found), "s"),
        Figure("first prediction, worst error", max(errors), "%", high=25),
    ]
    print(table(figures))
    if any(figure.missed for figure in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
