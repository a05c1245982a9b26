"""Measure whether ``dljob suggest --within`` keeps its limit, and whether predicted memory is enough.

    hack/env python -m benchmarks.suggest.within [--limits 60,120] [--data wine,digits]

For each data set and limit, the command and ``train.py`` run one after the other, as a user runs them, and their wall
time is compared with the limit. Goals: at most 105 % of the limit, a model that was evaluated, and a peak memory of at
most what the page says. Exit code 1 if a goal is missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lib.goals import Figure, table
from benchmarks.suggest.accuracy import DOCSTRINGS, TOPICS, write_data

GRACE = 3
"""A run is ended after so many times its limit."""


def measure(name: str, limit_s: int) -> list[Figure]:
    """Return the part of the limit that one run used, and the part of the predicted memory."""
    with tempfile.TemporaryDirectory() as folder:
        data, project = write_data(name, Path(folder)), Path(folder) / "project"
        began = time.monotonic()
        command = [sys.executable, "-m", "dljob.cli", "suggest", str(data), "--within", f"{limit_s}s", "--json"]
        done = subprocess.run(
            [*command, "--write", str(project)], capture_output=True, text=True, timeout=GRACE * limit_s, check=True
        )
        subprocess.run(
            [sys.executable, "train.py"], cwd=project, capture_output=True, timeout=GRACE * limit_s, check=True
        )
        used_s = time.monotonic() - began
        metrics = json.loads((project / "model" / "metrics.json").read_text(encoding="utf-8"))
    chosen = json.loads(done.stdout)["models"][0]
    predicted = chosen["predicted"]["memory_nbytes"]
    steps = f"{metrics['steps']} of {metrics['steps_planned']} steps"
    label = f"{name} within {limit_s} s: {chosen['settings']['name']}, {steps}"
    return [
        Figure(label, 100 * used_s / limit_s, "% of the limit", high=105),
        Figure(f"{name} within {limit_s} s: memory", 100 * metrics["peak_kib"] * 1024 / predicted, "%", high=100),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", default="60,120", help="seconds, separated by commas")
    parser.add_argument("--data", default=f"wine,digits,{DOCSTRINGS},{TOPICS}", help="names, separated by commas")
    given = parser.parse_args()
    limits = [int(text) for text in given.limits.split(",")]
    figures = [figure for name in given.data.split(",") for limit_s in limits for figure in measure(name, limit_s)]
    print(table(figures))
    return int(any(figure.missed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
