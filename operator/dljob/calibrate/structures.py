"""Refit the regression for CPUs (``perf.workload.structure``) to the random networks that a probe has measured.

The fit finds a factor for each term of the regression, for the time of a step and for the memory of a rank. It is the
same maximum a posteriori estimate as that of the probe's six reference networks (``calibrate.hardware``), which give
the factors that are expected before. Cross-validation over the networks decides if plans use the result: each network
is predicted by a fit to the others, and the refit must be better than the predictions without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dlcontract.hardware import SEQUENCE, HardwareMeasure
from dlcontract.structures import MIN_STRUCTURES, structures
from dljob.calibrate.hardware import PRIOR, map_estimate, workload_of
from dljob.cluster.catalogue import TermFactors, TimeFactors
from dljob.perf.fit.fitting import Floats
from dljob.perf.resources.memory import GROWTH_MARGIN
from dljob.perf.step.compute import PART_OF_TERM
from dljob.perf.workload import structure
from dljob.perf.workload.workload import Workload

GROWTH_PRIOR = 0.4
"""Standard deviation of the logarithm of a factor of memory before the measurement."""
UNKNOWN = 0.5
"""Median, before the measurement, of the factor of a term that is 0 by the constants of this release."""
COVERED = 0.98
"""Part of the networks that the predicted memory with ``GROWTH_MARGIN`` must cover. Pods beyond it are killed."""
FOLDS = 5
BETTER = 0.95
"""Factor by which the median error must fall, so that a difference by chance does not change plans."""
NOISE = {"time": 0.1, "memory": 0.03}
"""Standard deviation of log(measured / predicted) of a network. Noise and inexact formulas cause it."""


@dataclass(frozen=True)
class Errors:
    """Median errors on networks that a prediction did not see, relative to the measurement: 0.1 is 10 %."""

    sheet: float
    """With the constants of this release."""
    probe: float
    """With the factors of the probe's reference networks; for memory, equal to ``sheet``."""
    refit: float
    """With the factors of terms, fitted to the other networks."""
    deviation: float
    """Standard deviation of log(measured / predicted) with the factors of terms."""

    @property
    def improves(self) -> bool:
        """Return True if plans should use the factors of terms."""
        return self.refit < BETTER * min(self.sheet, self.probe)


@dataclass(frozen=True)
class Refit:
    """The refitted regression of a device type. ``networks``: number of networks that were measured."""

    networks: int
    time: TermFactors
    growth: TermFactors
    time_errors: Errors
    growth_errors: Errors


def refitted(measure: HardwareMeasure, factors: TimeFactors) -> Refit | None:
    """Return the regression that fits the random networks of a probe's document.

    ``factors``: those of its reference networks. Return None for a GPU, for networks of another sequence than that of
    this release, and for fewer than ``MIN_STRUCTURES`` networks.
    """
    found = measure.structures
    if found is None or found.sequence != SEQUENCE or measure.kind == "gpu":
        return None
    rows = [
        (workload_of(net), net.batches[0], seconds, 1024.0 * KiB)
        for net, seconds, KiB in zip(structures(len(found.s)), found.s, found.grown_KiB, strict=False)
        if seconds > 0 and KiB > 0
    ]
    if len(rows) < MIN_STRUCTURES:
        return None
    before = {
        name: getattr(factors, part) if structure.HOST_S.get(name) or structure.TIME_S.get(name) else 0.0
        for name, part in PART_OF_TERM.items()
    }
    times = [time_terms(workload, batch) for workload, batch, *_ in rows]
    growths = [_scaled(structure.growth_terms(workload, batch), structure.GROWTH_UNIT) for workload, batch, *_ in rows]
    seconds, grown = (np.array([row[i] for row in rows]) for i in (2, 3))
    time, time_errors = _scored(times, seconds, before, PRIOR, NOISE["time"])
    growth, growth_errors = _scored(growths, grown, {"convolution": 0.0}, GROWTH_PRIOR, NOISE["memory"], GROWTH_MARGIN)
    return Refit(len(rows), time, growth, time_errors, growth_errors)


def time_terms(workload: Workload, batch: int) -> dict[str, float]:
    """Return the seconds of each term of a step on a core of the catalogue, if its factor is 1."""
    terms = {**structure.host_terms(workload), **structure.time_terms(workload, batch)}
    return _scaled(terms, structure.UNIT_S)


def _scaled(terms: Mapping[str, float], units: Mapping[str, float]) -> dict[str, float]:
    return {name: units[name] * amount for name, amount in terms.items()}


def _scored(
    terms: list[dict[str, float]],
    amounts: Floats,
    before: Mapping[str, float],
    spread: float,
    noise: float,
    margin: float | None = None,
) -> tuple[TermFactors, Errors]:
    """Return the factors of the terms that fit all networks, and the errors on networks that a fit did not see.

    ``terms``: predicted part of each term, by network. ``amounts``: measured sums. ``before``: factors without this
    fit, 1 for terms without one. ``spread``: standard deviation of the logarithms of factors. ``noise``: that of
    measurements. ``margin``: factor on predictions that must cover ``COVERED`` of the unseen networks. If it does not,
    all factors are increased.
    """
    names = list(terms[0])
    parts = np.array([[row[name] for name in names] for row in terms])
    former = np.array([before.get(name, 1.0) for name in names])
    expected = np.where(former > 0, former, UNKNOWN)

    def fit(rows: Floats, measured: Floats) -> Floats:
        def predicted(logs: Floats) -> Floats:
            return np.asarray(np.log(rows @ (expected * np.exp(logs))))

        logs = map_estimate(predicted, np.log(measured), np.full(len(names), spread), noise)
        return np.asarray(expected * np.exp(logs))

    fold = np.arange(len(amounts)) % FOLDS
    unseen = np.zeros(len(amounts))
    for each in range(FOLDS):
        unseen[fold == each] = parts[fold == each] @ fit(parts[fold != each], amounts[fold != each])

    increase = 1.0 if margin is None else max(1.0, float(np.quantile(amounts / unseen, COVERED)) / margin)
    unseen *= increase

    def error(forecast: Floats) -> float:
        return float(np.median(np.abs(forecast / amounts - 1)))

    errors = Errors(
        sheet=error(parts @ (former > 0)),
        probe=error(parts @ former),
        refit=error(unseen),
        deviation=float(np.sqrt(np.mean(np.log(unseen / amounts) ** 2))),
    )
    return tuple(zip(names, (increase * fit(parts, amounts)).tolist(), strict=True)), errors
