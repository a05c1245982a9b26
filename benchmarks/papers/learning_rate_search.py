"""Compare final accuracies with and without a search of the learning rate, at 1, 2, 4 and 8 times the batch size.

    python -m benchmarks.papers.learning_rate_search [--dataset digits breast-cancer] [--seeds 5] [--epochs 10]

The built-in model mlp is trained by two real ranks on bundled data sets, for the same number of epochs with every batch
size, so that larger batches make fewer updates. Arms:

    given      the learning rate that suits the smallest batch, at every batch size
    Loss       the learning-rate range test by the curve of the loss (``optimizer.findLearningRate``)
    Accuracy   the same test by the curve of the accuracy (``optimizer.learningRateCurve: Accuracy``)
    uneven     the ranks have a quarter and three quarters of each batch, instead of halves

Both curves get a polynomial of high degree and a logarithmic fit (``dltrain.builtin.range_test``). The tables have
means over seeds, and paired differences with their standard error. Ranks weight gradients by local batch sizes, so even
and uneven local batches must end at equal accuracies, but for rounding. A run whose loss is no longer finite has
diverged, and counts with the accuracy that it had reached.

A summary has, for each data set and arm, the accuracy that the largest batch loses against the smallest. It also has
the difference that uneven local batches make, as the mean over all batch sizes and arms of a seed.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any

from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH, mpirun
from benchmarks.papers.learning_rate_search_ranks import GIVEN, WAYS, WEIGHTS

FACTORS = (1, 2, 4, 8)
DATASETS = {"digits": 32, "breast-cancer": 16, "wine": 8}
"""Bundled data set → the smallest batch size."""
Rows = list[dict[str, Any]]


def run(dataset: str, seeds: Sequence[int], options: argparse.Namespace) -> Rows:
    """Train all arms on two ranks and return a row for each. Raise CalledProcessError if the ranks fail."""
    settings = {
        "dataset": dataset, "batch": DATASETS[dataset], "factors": options.factors, "epochs": options.epochs,
        "rate": options.rate, "seeds": list(seeds),
    }  # fmt: skip
    command = [*mpirun(2), sys.executable, "-m", "benchmarks.papers.learning_rate_search_ranks", json.dumps(settings)]
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def difference(rows: Rows, one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float | None]:
    """Return the mean accuracy of the rows of ``one`` minus those of ``other``, paired by seed, and its standard error.

    ``one``, ``other``: values that the rows must have. Both are in points. The error is None for one seed.
    """

    def by_seed(wanted: dict[str, Any]) -> dict[int, float]:
        return {row["seed"]: 100 * row["accuracy"] for row in rows if wanted.items() <= row.items()}

    first, second = by_seed(one), by_seed(other)
    found = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    return fmean(found), stdev(found) / sqrt(len(found)) if len(found) > 1 else None


def lost(rows: Rows, way: str) -> tuple[float, float | None]:
    """Return the points that the largest batch loses against the smallest, with even local batches.

    The second value is the standard error, which is None for one seed.
    """
    factors = [row["factor"] for row in rows]
    arm = {"way": way, "shares": "even"}
    return difference(rows, arm | {"factor": min(factors)}, arm | {"factor": max(factors)})


def split_effect(rows: Rows) -> tuple[float, float | None]:
    """Return the points that uneven local batches win, as a mean over seeds, and its standard error.

    The runs of a seed start from the same weights and are not independent. So they count as one: their mean.
    """
    means = []
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in rows if row["seed"] == seed]
        even, uneven = ([100 * row["accuracy"] for row in own if row["shares"] == shares] for shares in WEIGHTS)
        means.append(fmean(uneven) - fmean(even))
    return fmean(means), stdev(means) / sqrt(len(means)) if len(means) > 1 else None


def text(found: tuple[float, float | None]) -> str:
    return f"{round(found[0], 2) + 0.0:+.2f}" + ("" if found[1] is None else f" ± {found[1]:.2f}")


def show(dataset: str, rows: Rows) -> None:
    """Print the final accuracies by batch size, the gain of a search, and the effect of uneven local batches."""
    factors = sorted({row["factor"] for row in rows})
    seeds = len({row["seed"] for row in rows})
    batch = DATASETS[dataset]
    print(f"\n## {dataset}, {seeds} seeds\n\n| batch | arm | rate, geometric mean | accuracy, even, % ", end="")
    more = "accuracy, uneven, % | uneven - even, points | search - given (even), points"
    print(f"| {more} | diverged | tests without a rate |")
    print("|---|---|---|---|---|---|---|---|---|")
    for factor, way in product(factors, WAYS):
        arm = {"factor": factor, "way": way}
        own = [row for row in rows if arm.items() <= row.items()]
        means = [100 * fmean(r["accuracy"] for r in own if r["shares"] == shares) for shares in WEIGHTS]
        split = difference(rows, arm | {"shares": "uneven"}, arm | {"shares": "even"})
        gain = difference(rows, arm | {"shares": "even"}, {"factor": factor, "way": GIVEN, "shares": "even"})
        cells = [
            f"{factor} x {batch}", way, f"{geometric_mean(row['rate'] for row in own):.3g}",
            *(f"{mean:.2f}" for mean in means), text(split), "-" if way == GIVEN else text(gain),
            f"{sum(row['diverged'] for row in own)} of {len(own)}",
            "-" if way == GIVEN else f"{sum(not row['found'] for row in own)} of {len(own)}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def summarize(stored: dict[str, Rows]) -> None:
    """Print what the largest batch loses with each arm, and what uneven local batches change, by data set."""
    columns = " | ".join(f"largest batch loses, {way}, points" for way in WAYS)
    print(f"\n## Summary\n\n| data set | {columns} | uneven - even, points | diverged |\n{'|---' * (len(WAYS) + 3)}|")
    for dataset, rows in stored.items():
        cells = [text(lost(rows, way)) for way in WAYS]
        diverged = f"{sum(row['diverged'] for row in rows)} of {len(rows)}"
        print(f"| {dataset} | {' | '.join(cells)} | {text(split_effect(rows))} | {diverged} |")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", nargs="+", choices=list(DATASETS), default=["digits", "breast-cancer"])
    parser.add_argument("--factors", nargs="+", type=int, default=list(FACTORS), help="multiples of the smallest batch")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.05, help="given learning rate (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for all rows. Seeds that it contains are not repeated")
    options = parser.parse_args(arguments)
    if min(options.seeds, options.epochs, *options.factors) < 1 or not 0 < options.rate <= 100:
        parser.error(
            f"found --seeds {options.seeds}, --epochs {options.epochs}, --factors {options.factors}, --rate "
            f"{options.rate:g}; expected 1 or more of the first three, and a rate above 0 and at most 100"
        )
    print(f"mlp, {options.epochs} epochs, 2 ranks, {options.seeds} seeds; {machine()}", flush=True)
    stored: dict[str, Rows] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for dataset in options.dataset:
        rows = stored.setdefault(dataset, [])
        for seed in range(len({row["seed"] for row in rows}), options.seeds):
            rows += run(dataset, [seed], options)
            if options.json:
                options.json.write_text(json.dumps(stored))
        show(dataset, rows)
    summarize({dataset: stored[dataset] for dataset in options.dataset})
    return 0


if __name__ == "__main__":
    sys.exit(main())
