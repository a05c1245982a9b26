"""Predictions from measured multi-device steps, instead of latencies, bandwidths and assumed overlap.

Once a profile has one such step, ``calibrate.scaling`` predicts every placement from the prior and the measurements,
with an interval. ``benchmarks/perfmodel/published.py`` evaluates this on public measurements.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import exp, log
from statistics import fmean
from typing import get_args

import numpy as np

from dljob.calibrate.learned import LearnedPoint, StepPoint
from dljob.calibrate.scaling import Posterior, fit
from dljob.perf.fit.curve import Curve
from dljob.perf.fit.scaling import Floats, Runs
from dljob.perf.step.communication import Link, Number, allreduce_s, ring_s
from dljob.perf.step.step import P90, buckets
from dljob.planner.types import CollectiveName

LEVEL = 0.8
"""Level of the central interval whose upper end is the p90."""


def communication_ratio(collective: CollectiveName, nbytes: int, ranks: Number, nodes: Number, link: Link) -> Floats:
    """Return the communication time of a collective divided by that of a ring at the same placement, by the formulas.

    1 for Ring, and for Torch, whose steps are measured directly.
    """
    if collective in ("Ring", "Torch"):
        return np.ones(np.shape(ranks))
    parts, n, over = buckets(nbytes), np.asarray(ranks, dtype=float), np.asarray(nodes, dtype=float)
    ring = parts * ring_s(nbytes / parts, n, link, over)
    return np.asarray(allreduce_s(collective, float(nbytes), n, link, parts, nodes=over) / ring)


def posterior(
    points: Sequence[LearnedPoint],
    steps: Sequence[StepPoint],
    alone: Curve,
    nbytes: int,
    link_over: Callable[[int], Link],
) -> Posterior | None:
    """Return the posterior over all placements; None without measured steps or without a one-device time.

    ``alone``: seconds of a batch on one device. ``link_over``: the link between ranks on a number of nodes; it serves
    only to compare collectives.
    """
    if not steps or not points:
        return None
    talks = [
        float(
            communication_ratio(
                _known(s.place.collective), nbytes, s.place.devices, s.place.nodes, link_over(s.place.nodes)
            )
        )
        for s in steps
    ]
    one_s = tuple(alone.seconds(s.batch) for s in steps)
    return _fitted(exp(fmean(log(p.compute_s) for p in points)), tuple(steps), one_s, tuple(talks))


def _known(collective: str) -> CollectiveName:
    """Return the collective that a profile names; an unknown name counts as Ring."""
    names: tuple[CollectiveName, ...] = get_args(CollectiveName)
    return next((name for name in names if name == collective), "Ring")


@lru_cache(maxsize=256)
def _fitted(
    reference_s: float, steps: tuple[StepPoint, ...], one_s: tuple[float, ...], talks: tuple[float, ...]
) -> Posterior:
    """Fit and cache: a fit takes some milliseconds, and every plan needs the same profiles."""
    columns = [(s.place.nodes, s.place.node_devices, s.place.devices, s.batch) for s in steps]
    nodes, busiest, devices, batch = np.array(columns, dtype=float).T
    runs = Runs(nodes, busiest, devices, batch, np.array(one_s), np.array(talks))
    return fit(reference_s, runs, np.array([s.step_s for s in steps]))


def predicted(found: Posterior, runs: Runs) -> tuple[Floats, Floats]:
    """Return the median step seconds without input time, and the standard deviation of their logarithms (from p90)."""
    said = found.predict(runs, LEVEL)
    return said.median_s, np.asarray(np.log(said.high_s / said.median_s) / P90)
