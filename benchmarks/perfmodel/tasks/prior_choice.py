"""Choose two values of the prior of multi-device steps by cross-validation over data sets.

    python -m benchmarks.perfmodel.tasks.prior_choice --pollux DIR --gavel DIR [--values growth] [--seeds 10]

The values of ``overlap`` are the deviation of ``log_gamma`` (overlap of computing and communication) and ``smooth``.
Those of ``growth`` are the median and the deviation (of the logarithm) of the exponent with which communication grows
with the computing time. Each data set of ``few_measurements`` is left out in turn, and then each cluster (source). The
values with the smallest median error on the others, relative to that with the values of ``Choice.before`` and averaged
over numbers of measurements and data sets, are scored on what was left out. Single rows are not left out, because the
rows of a data set have errors in common.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.tasks.few_measurements import DataSet, Score, of_gavel, of_pollux, score

from dljob.calibrate.prior import DEVIATION, MEAN, Prior

Values = tuple[float, float]
NO_GROWTH = 1e-12


@dataclass(frozen=True)
class Choice:
    """Values to choose from. ``prior``: function from values to a prior. ``before``: values to compare with."""

    before: Values
    grid: tuple[Values, ...]
    prior: Callable[[Values], Prior]


def overlap(values: Values) -> Prior:
    return Prior(
        mean=replace(MEAN, log_growth=log(NO_GROWTH)),
        deviation=replace(DEVIATION, log_gamma=values[0]),
        smooth=values[1],
    )


def growth(values: Values) -> Prior:
    return Prior(mean=replace(MEAN, log_growth=log(values[0])), deviation=replace(DEVIATION, log_growth=values[1]))


CHOICES = {
    "overlap": Choice((0.9, 0.08), tuple(product((0.9, 1.3, 1.8, 2.5), (0.06, 0.08, 0.1))), overlap),
    "growth": Choice((NO_GROWTH, 1.0), ((NO_GROWTH, 1.0), *product((0.02, 0.05, 0.1), (1.0, 1.5))), growth),
}
COUNTS = (1, 2, 3, 4, 5, 7, 10)


def change(scores: Sequence[Score], before: Sequence[Score]) -> float:
    """Return by how many per cent errors are higher than ``before`` (geometric mean); negative if they are lower."""
    return float(100 * np.expm1(np.mean([np.log(a.ours / b.ours) for a, b in zip(scores, before, strict=True)])))


def held_out(choice: Choice, scores: dict[Values, list[Score]], group: Callable[[Score], object]) -> list[str]:
    """Return a text for each choice of values: how often it was made, and the errors on the groups left out."""

    def chosen(left_out: object) -> Values:
        others = {values: [s for s in found if group(s) != left_out] for values, found in scores.items()}
        return min(others, key=lambda values: change(others[values], others[choice.before]))

    picks = {each: chosen(each) for each in dict.fromkeys(map(group, scores[choice.before]))}
    pairs = [
        (a, b)
        for each, values in picks.items()
        for a, b in zip(scores[values], scores[choice.before], strict=True)
        if group(a) == each
    ]
    after, before = zip(*pairs, strict=True)
    lines = [f"  {values}: chosen {times} times of {len(picks)}" for values, times in Counter(picks.values()).items()]
    lines.append(f"  error on what was left out: {change(after, before):+.1f} %")
    for count in COUNTS:
        these = [(s, b) for s, b in pairs if s.count == count]
        if these:
            error, covered = (np.mean([getattr(s, f) for s, _ in these]) for f in ("ours", "covered"))
            other = np.mean([b.simple for _, b in these])
            lines.append(f"  {count:3} measurements: {error:5.1f} % (simple {other:.1f} %), covered {covered:.1f} %")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pollux", type=Path, required=True)
    parser.add_argument("--gavel", type=Path, required=True)
    parser.add_argument("--values", choices=tuple(CHOICES), default="growth")
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args(arguments)
    choice = CHOICES[options.values]
    sets: list[DataSet] = [*of_pollux(options.pollux, 4), *of_gavel(options.gavel)]

    def scored(values: Values) -> list[Score]:
        each = (
            score(data, count, options.seeds, choice.prior(values), with_simple=values == choice.before)
            for data in sets
            for count in COUNTS
        )
        return [found for found in each if found is not None]

    scores = {values: scored(values) for values in choice.grid}
    for values, found in scores.items():
        covered = np.mean([s.covered for s in found if s.count >= 3])
        off = change(found, scores[choice.before])
        print(f"{values}: error {off:+.1f} %, covered from three measurements {covered:.1f} %")
    for title, group in (("data set", lambda s: (s.source, s.name)), ("cluster", lambda s: s.source)):
        print("\n".join([f"Left out: one {title}", *held_out(choice, scores, group)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
