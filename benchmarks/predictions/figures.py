"""Errors and coverage of predicted step times and total times, from the runs of ``benchmarks.predictions``.

A run is a JSON object with ``name``, ``configuration``, ``run`` (1: before any run of its model, 2: after one),
``predicted`` (as in ``status.plan``), ``measured_s`` (a step) and ``total_s``.
"""

from collections.abc import Callable
from math import exp, log
from statistics import NormalDist, median
from typing import Any

from benchmarks.lib.binomial import wilson
from benchmarks.lib.goals import Figure

Json = dict[str, Any]
P90, P95 = (NormalDist().inv_cdf(level) for level in (0.9, 0.95))


def ratio(run: Json) -> float:
    """Return predicted / measured step time."""
    return float(run["predicted"]["stepSeconds"] / run["measured_s"])


def total_ratio(run: Json) -> float:
    return float(run["predicted"]["totalSeconds"] / run["total_s"])


def half_width(run: Json) -> float:
    """Return the logarithm of (upper end of the 90 % interval / median)."""
    predicted = run["predicted"]
    return log(predicted["stepSecondsP90"] / predicted["stepSeconds"]) * P95 / P90


def inside(run: Json, of: Callable[[Json], float] = ratio) -> bool:
    """Return True if the measured value is in the 90 % interval. ``of``: predicted / measured value."""
    return abs(log(of(run))) <= half_width(run)


def error(runs: list[Json], of: Callable[[Json], float] = ratio) -> float:
    """Return the median of |predicted / measured - 1| in per cent; not a number without runs."""
    return 100 * median(abs(of(run) - 1) for run in runs) if runs else float("nan")


def coverage(runs: list[Json], of: Callable[[Json], float] = ratio) -> tuple[float, str]:
    """Return (per cent of runs within their intervals, text with binomial intervals by runs and by configurations)."""
    names = {run["name"] for run in runs}
    if not runs:
        return float("nan"), "no runs"
    part = sum(inside(run, of) for run in runs) / len(runs)
    texts = []
    for trials, unit in ((len(runs), "runs"), (len(names), "configurations")):
        low, high = wilson(part * trials, trials)
        texts.append(f"{100 * low:.0f}–{100 * high:.0f} % by {trials} {unit}")
    return 100 * part, ", ".join(texts)


def repeat_noise(runs: list[Json]) -> float:
    """Return the median of |first / second measured step - 1| in per cent, over the pairs of equal runs."""
    pairs: dict[tuple[str, int], dict[int, float]] = {}
    for run in runs:
        pairs.setdefault((run["name"], run["round"]), {})[run["run"]] = run["measured_s"]
    apart = [abs(pair[1] / pair[2] - 1) for pair in pairs.values() if len(pair) == 2]
    return 100 * median(apart) if apart else float("nan")


def figures(runs: list[Json], failed: list[str]) -> list[Figure]:
    found = [
        Figure("configurations", len({run["name"] for run in runs}), low=20),
        Figure("runs", len(runs), low=120),
        Figure("runs that failed", len(failed), high=0),
        Figure("repeat noise of a step", repeat_noise(runs), "%"),
    ]
    for words, number, goal in (("first runs", 1, 15.0), ("second runs", 2, 7.0)):
        mine = [run for run in runs if run["run"] == number]
        part, text = coverage(mine)
        found.append(Figure(f"{words}: median error of a step", error(mine), "%", high=goal))
        found.append(Figure(f"{words}: coverage of 90 % intervals ({text})", part, "%", low=85, high=95))
        below = sum(log(ratio(run)) >= -half_width(run) * P90 / P95 for run in mine)
        found.append(Figure(f"{words}: steps below their p90", 100 * below / max(1, len(mine)), "%"))
        part, text = coverage(mine, total_ratio)
        found.append(Figure(f"{words}: median error of the total time", error(mine, total_ratio), "%"))
        found.append(Figure(f"{words}: coverage by total times ({text})", part, "%"))
    return found


def rows(runs: list[Json]) -> list[str]:
    """Return a table with a line for each configuration and run number: medians over the rounds.

    "of factor": the median half width of the 90 % intervals, as a factor on the predicted time.
    """
    columns = "configuration", "run", "predicted, ms", "measured, ms (range)", "ratio", "in 90 % interval", "total"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in dict.fromkeys(run["name"] for run in runs):
        for number in (1, 2):
            mine = [run for run in runs if run["name"] == name and run["run"] == number]
            if mine:
                predicted, measured = ([1e3 * s for s in each] for each in zip(*map(times, mine), strict=True))
                cells = [
                    name,
                    f"{number}",
                    f"{median(predicted):.2f}",
                    f"{median(measured):.2f} ({min(measured):.2f}–{max(measured):.2f})",
                    f"{median(map(ratio, mine)):.2f}",
                    f"{sum(map(inside, mine))} of {len(mine)}, of factor {exp(median(map(half_width, mine))):.2f}",
                    f"{median(map(total_ratio, mine)):.2f}",
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def times(run: Json) -> tuple[float, float]:
    return run["predicted"]["stepSeconds"], run["measured_s"]


def groups(runs: list[Json]) -> list[str]:
    """Return lines with the median ratio and the median error of runs of each model, and of each layout."""

    def model(run: Json) -> str:
        return str(run["configuration"]["model"])

    def layout(run: Json) -> str:
        of = run["configuration"]
        return f"{of['nodes']} x {of['ranks_per_node']} ranks, {of['cpu']} CPU"

    lines = []
    for by in (model, layout):
        for group in sorted({by(run) for run in runs}):
            words = [f"{group:24}"]
            for number in (1, 2):
                mine = [run for run in runs if by(run) == group and run["run"] == number]
                if mine:
                    ratios = f"predicted / measured {median(map(ratio, mine)):.2f}, median error {error(mine):.0f} %"
                    words.append(f"{'first' if number == 1 else 'second'} runs: {ratios}")
            lines.append("; ".join(words))
    return lines
