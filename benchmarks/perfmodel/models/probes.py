"""Predict times on a new device from probes on it and from other devices, and choose these probes."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from dljob.perf.fit.few_points import line
from dljob.perf.fit.fitting import Floats
from dljob.perf.fit.new_device import REPEAT_NOISE, Point, Sheet, covariance_of, seconds, valid_points


def with_probes(
    sheets: Mapping[str, Sheet], known: Mapping[Point, float], probes: Mapping[Point, float], asked: Sequence[Point]
) -> Floats:
    """Return ``seconds`` with ``probes`` on the new device, combined with a line through two probed batches.

    The prediction from other devices and the line through the probes have independent errors, so their geometric mean
    is returned. Errors as for ``seconds``.
    """
    found = seconds(sheets, {**known, **probes}, asked)
    for i, point in enumerate(asked):
        own = [(p.batch, t) for p, t in probes.items() if (p.device, p.workload) == (point.device, point.workload)]
        if len({b for b, _ in own}) >= 2:
            batches, times = (np.array(column, dtype=float) for column in zip(*own, strict=True))
            overhead, slope = line(batches, times)
            found[i] = float(np.sqrt(found[i] * (overhead + slope * point.batch)))
    return found


def next_probe(sheets: Mapping[str, Sheet], known: Collection[Point], candidates: Sequence[Point]) -> Point:
    """Return the candidate that should be measured next, because it tells most about the other candidates' times.

    ``sheets``: data sheet of each device, by name. ``known``: points that were already measured. Measuring candidate j
    explains the fraction cov(i, j)² / (var(i) (var(j) + noise)) of the variance of candidate i. The returned candidate
    j has the largest sum of these fractions over all other candidates i. If variances were summed instead of fractions,
    a few very uncertain candidates would dominate. Variances do not depend on measured values, so a series of probes
    can be chosen before the first measurement. Raise ValueError for the same invalid points as ``seconds`` does.
    """
    covariance = covariance_of(sheets, valid_points(sheets, known, candidates))
    n = len(known)
    inner = covariance[:n, :n] + REPEAT_NOISE**2 * np.eye(n)
    left = covariance[n:, n:] - covariance[n:, :n] @ np.linalg.solve(inner, covariance[:n, n:])
    variance = np.diag(left)
    explained = left**2 / variance[:, None] / (variance + REPEAT_NOISE**2)[None, :]
    return candidates[int(np.argmax(explained.sum(axis=0) - np.diag(explained)))]
