"""Predictions from measured multi-device steps, instead of latencies, bandwidths and assumed overlap.

If a profile contains at least one measured multi-device step, ``calibrate.scaling`` predicts the step time of every
placement, with an interval, from the prior distribution and the measurements. ``benchmarks/perfmodel/published.py``
evaluates these predictions on public measurements.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import exp, log
from statistics import fmean
from typing import get_args

import numpy as np

from dlcontract import DDP_BUCKET_NBYTES
from dljob.calibrate.learned import LearnedPoint, StepPoint
from dljob.calibrate.scaling import Posterior, fit
from dljob.perf.fit.scaling import Floats, Runs
from dljob.perf.step.backends import Backend
from dljob.perf.step.backends import backend as measured_backend
from dljob.perf.step.communication import Link, Number, allreduce_s, ring_s
from dljob.perf.step.step import P90, buckets
from dljob.planner.types import CollectiveName

LEVEL = 0.8
"""Probability that a step time is in the predicted interval. The interval is central, so its upper end is the p90."""


def communication_ratio(
    collective: CollectiveName,
    nbytes: int,
    ranks: Number,
    nodes: Number,
    link: Link,
    tensors: int = 1,
    backend: Backend | None = None,
) -> Floats:
    """Return the predicted communication time of a collective divided by that of a ring at the same placement.

    The model that is fitted to measured steps predicts the time of a ring, and multiplies it by this ratio. The ratio
    is 1 for Ring, and for Torch, whose steps are measured directly. For DDP, it is that of larger buckets. ``nbytes``:
    size of the gradients. ``ranks``, ``nodes``: numbers, or arrays of equal shape; either all elements of ``nodes`` are
    1 or none is. ``tensors``: number of parameter tensors, used only by LayeredServer. ``backend``: communication
    backend of the collective, whose ratios ``link`` includes; the ring's time is then that of MPI, with which steps
    were measured. None: no backend's ratios.
    """
    if collective in ("Ring", "Torch") and backend is None:
        return np.ones(np.shape(ranks))
    parts, n, over = buckets(nbytes), np.asarray(ranks, dtype=float), np.asarray(nodes, dtype=float)
    ring_link = link
    if backend is not None:
        count = int(np.max(over))
        ring_link, _ = measured_backend("MPI").over(backend.undone(link, count), 0.0, count)
    ring = parts * ring_s(nbytes / parts, n, ring_link, over)
    if backend is not None or collective == "DDP":
        parts = buckets(nbytes, DDP_BUCKET_NBYTES if backend is None else backend.bucket_nbytes)
    return np.asarray(allreduce_s(collective, float(nbytes), n, link, parts, nodes=over, tensors=tensors) / ring)


def posterior(
    points: Sequence[LearnedPoint],
    steps: Sequence[StepPoint],
    one_s: Sequence[float],
    nbytes: int,
    link_over: Callable[[int], Link],
    least_spread: float = 0.0,
) -> Posterior | None:
    """Return a fitted model that predicts the step time of every placement on one device type, with its uncertainty.

    The model is a posterior distribution, given the measured multi-device steps ``steps`` and the measured one-device
    times ``points``. Return None if either is empty. ``one_s``: for each step, the computing seconds of one of its
    devices alone. ``nbytes``: size of the gradients in bytes. ``link_over``: function from a number of nodes to the
    link between their ranks, which is used only to compare collectives. ``least_spread``: least standard deviation of
    log(measured / predicted), because equal runs differ.
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
    reference_s = exp(fmean(log(p.compute_s) for p in points))
    return _fitted(reference_s, tuple(steps), tuple(one_s), tuple(talks), least_spread)


def _known(collective: str) -> CollectiveName:
    """Return ``collective``, a name from a profile, if this release knows a collective of this name; otherwise Ring."""
    names: tuple[CollectiveName, ...] = get_args(CollectiveName)
    return next((name for name in names if name == collective), "Ring")


@lru_cache(maxsize=256)
def _fitted(
    reference_s: float,
    steps: tuple[StepPoint, ...],
    one_s: tuple[float, ...],
    talks: tuple[float, ...],
    least_spread: float,
) -> Posterior:
    """Fit the posterior distribution of step times to ``steps``.

    ``reference_s``: typical step seconds on one device. For each of ``steps``, ``one_s`` has the step seconds on one
    device, and ``talks`` the ``communication_ratio``. The result is cached, because a fit takes some milliseconds and
    every plan needs the same fits.
    """
    columns = [(s.place.nodes, s.place.node_devices, s.place.devices, s.batch) for s in steps]
    nodes, busiest, devices, batch = np.array(columns, dtype=float).T
    runs = Runs(nodes, busiest, devices, batch, np.array(one_s), np.array(talks))
    return replace(fit(reference_s, runs, np.array([s.step_s for s in steps])), least_spread=least_spread)


def predicted(found: Posterior, runs: Runs) -> tuple[Floats, Floats]:
    """Return (median step seconds without input time, standard deviation of log(step seconds)) for each run.

    The standard deviation follows from the predicted p90, and is at least ``found.least_spread``.
    """
    said = found.predict(runs, LEVEL)
    return said.median_s, np.maximum(found.least_spread, np.log(said.high_s / said.median_s) / P90)
