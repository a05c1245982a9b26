"""Choose two values of the prior of multi-device steps by cross-validation over data sets.

    python -m benchmarks.perfmodel.tasks.prior_choice --pollux DIR --gavel DIR [--seeds 10]

The values are the deviation of ``log_gamma`` (overlap of computing and communication) and ``smooth``. Each data set of
``few_measurements`` is left out in turn, and then each cluster (source). The values with the smallest median error on
the others, relative to that with the values of ``BEFORE`` and averaged over numbers of measurements and data sets, are
scored on what was left out. Single rows are not left out, because the rows of a data set have errors in common.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.tasks.few_measurements import DataSet, Score, of_gavel, of_pollux, score

from dljob.calibrate.prior import DEVIATION, Prior

Values = tuple[float, float]
"""Deviation of ``log_gamma``, and ``smooth``."""
BEFORE: Values = (0.9, 0.08)
GRID: tuple[Values, ...] = tuple(product((0.9, 1.3, 1.8, 2.5), (0.06, 0.08, 0.1)))
COUNTS = (1, 2, 3, 4, 5, 7, 10)


def prior(values: Values) -> Prior:
    return Prior(deviation=replace(DEVIATION, log_gamma=values[0]), smooth=values[1])


def change(scores: Sequence[Score], before: Sequence[Score]) -> float:
    """Return by how many per cent errors are higher than ``before`` (geometric mean); negative if they are lower."""
    return float(100 * np.expm1(np.mean([np.log(a.ours / b.ours) for a, b in zip(scores, before, strict=True)])))


def chosen(scores: dict[Values, list[Score]], keep: Callable[[Score], bool]) -> Values:
    """Return the values with the smallest errors on the scores to ``keep``."""
    kept = {values: [s for s in found if keep(s)] for values, found in scores.items()}
    return min(kept, key=lambda values: change(kept[values], kept[BEFORE]))


def held_out(scores: dict[Values, list[Score]], group: Callable[[Score], object]) -> list[str]:
    """Return a text for each choice of values: how often it was made, and the errors on the groups left out."""
    groups = dict.fromkeys(map(group, scores[BEFORE]))
    picks = {each: chosen(scores, lambda s, each=each: group(s) != each) for each in groups}  # type: ignore[misc]
    pairs = [
        (a, b)
        for each, values in picks.items()
        for a, b in zip(scores[values], scores[BEFORE], strict=True)
        if group(a) == each
    ]
    after, before = zip(*pairs, strict=True)
    lines = [f"  {values}: chosen {times} times of {len(groups)}" for values, times in Counter(picks.values()).items()]
    lines.append(f"  error on what was left out: {change(after, before):+.1f} %")
    for count in COUNTS:
        these = [s for s in after if s.count == count]
        if these:
            error, other, covered = (np.mean([getattr(s, f) for s in these]) for f in ("ours", "simple", "covered"))
            lines.append(f"  {count:3} measurements: {error:5.1f} % (simple {other:.1f} %), covered {covered:.1f} %")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pollux", type=Path, required=True)
    parser.add_argument("--gavel", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args(arguments)
    sets: list[DataSet] = [*of_pollux(options.pollux, 4), *of_gavel(options.gavel)]
    pairs = [(data, count) for data in sets for count in COUNTS]
    scores = {
        values: [s for data, count in pairs if (s := score(data, count, options.seeds, prior(values))) is not None]
        for values in GRID
    }
    for values, found in scores.items():
        covered = np.mean([s.covered for s in found if s.count >= 3])
        print(
            f"{values}: error {change(found, scores[BEFORE]):+.1f} %, covered from three measurements {covered:.1f} %"
        )
    for title, group in (("data set", lambda s: (s.source, s.name)), ("cluster", lambda s: s.source)):
        print("\n".join([f"Left out: one {title}", *held_out(scores, group)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
