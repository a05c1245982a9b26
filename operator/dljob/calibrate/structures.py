"""Refit the regression for CPUs (``perf.workload.structure``) to the random networks that a probe has measured.

The fit finds a factor for each term of the regression, for the time of a step and for the memory of a rank. It is the
same maximum a posteriori estimate as that of the probe's six reference networks (``calibrate.hardware``), which give
the factors that are expected before. Cross-validation over the networks decides if plans use the result: each network
is predicted by a fit to the others, and the refit must be better than the predictions without it.

Some networks are also measured on several ranks of a node. The model of communication and waiting prices what a step
takes beyond computing, so that the regression remains one of computing alone. These steps count in the fit only if
those of unseen networks are then predicted better, and steps on one core no worse. Otherwise, only their errors count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlcontract.hardware import SEQUENCE, HardwareMeasure
from dlcontract.structures import MIN_STRUCTURES, on_ranks, structures
from dljob.calibrate.hardware import PRIOR, map_estimate, workload_of
from dljob.cluster import catalogue
from dljob.cluster.catalogue import TermFactors, TimeFactors
from dljob.cluster.hardware import LinkSpeed
from dljob.perf.fit.fitting import Floats
from dljob.perf.resources.memory import GROWTH_MARGIN
from dljob.perf.step.communication import SHARED_MEMORY_LATENCY_S, Link
from dljob.perf.step.compute import PART_OF_TERM
from dljob.perf.step.core_scaling import CoreUse
from dljob.perf.step.step import OVERLAP_EFFICIENCY, step
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
LEAST_COMPUTING = 0.5
"""Minimum part of computing in a step on several ranks. With less, errors of the communication model would dominate."""
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
class OnRanks:
    """Networks that were measured on ``ranks`` ranks of one node. ``networks``: number of them.

    ``error``: median error of their steps, predicted by a fit to other networks; None if no network can be compared.
    ``watts``: median power of the CPU packages due to all ranks; None: no readable counter.
    """

    ranks: int
    networks: int
    error: float | None
    watts: float | None


@dataclass(frozen=True)
class Refit:
    """The refitted regression of a device type. ``networks``: number of networks that were measured on one core.

    ``on_ranks``: the measurements on one rank and on several. ``fits_ranks``: True if those on several ranks count in
    the fit.
    """

    networks: int
    time: TermFactors
    growth: TermFactors
    time_errors: Errors
    growth_errors: Errors
    on_ranks: tuple[OnRanks, ...] = ()
    fits_ranks: bool = False


@dataclass(frozen=True)
class _RankRow:
    """A network on several ranks. ``at``: its position among the networks on one core that are measured."""

    at: int
    ranks: int
    terms: dict[str, float]
    compute_s: float
    step_s: float
    """Measured seconds of a step, of which ``compute_s`` are computing by the model of communication."""


def refitted(
    measure: HardwareMeasure, factors: TimeFactors, near: LinkSpeed | None = None, memory_cores: float | None = None
) -> Refit | None:
    """Return the regression that fits the random networks of a probe's document.

    ``factors``: those of its reference networks. ``near``: measured link between ranks of the node. ``memory_cores``:
    measured number of cores that use the whole memory bandwidth of the node. Return None for a GPU, for networks of
    another sequence than that of this release, and for fewer than ``MIN_STRUCTURES`` networks.
    """
    found = measure.structures
    if found is None or found.sequence != SEQUENCE or measure.kind == "gpu":
        return None
    nets = structures(len(found.s))
    rows = [
        (i, workload_of(net), net.batches[0], seconds, 1024.0 * KiB)
        for i, (net, seconds, KiB) in enumerate(zip(nets, found.s, found.grown_KiB, strict=False))
        if seconds > 0 and KiB > 0
    ]
    if len(rows) < MIN_STRUCTURES:
        return None
    speed = {name: float(getattr(factors, part)) for name, part in PART_OF_TERM.items()}
    before = _before({**structure.HOST_S, **structure.TIME_S}, structure.UNIT_S, speed)
    times = [time_terms(workload, batch) for _, workload, batch, *_ in rows]
    growths = [
        _scaled(structure.growth_terms(workload, batch), structure.GROWTH_UNIT) for _, workload, batch, *_ in rows
    ]
    seconds, grown = (np.array([row[i] for row in rows]) for i in (3, 4))
    single = np.arange(len(rows))
    several = _rank_rows(measure, {i: at for at, (i, *_) in enumerate(rows)}, near, memory_cores)
    every = [*times, *(row.terms for row in several)], np.array([*seconds, *(row.compute_s for row in several)])
    networks = np.array([*single, *(row.at for row in several)])
    time = _scored(*every, before, PRIOR, NOISE["time"], networks=networks, fitted=len(rows))
    fits_ranks = False
    if several:
        both = _scored(*every, before, PRIOR, NOISE["time"], networks=networks)
        parts = slice(len(rows)), slice(len(rows), None)
        without, with_ranks = ([_median(each.unseen[at], every[1][at]) for at in parts] for each in (time, both))
        if includes_ranks(without, with_ranks):
            time, fits_ranks = both, True
    time_errors = _errors(time, seconds)
    held = _before(structure.GROWTH, structure.GROWTH_UNIT)
    growth = _scored(growths, grown, held, GROWTH_PRIOR, NOISE["memory"], GROWTH_MARGIN)
    on = [OnRanks(1, len(rows), time_errors.refit, _median_watts(found.watts))]
    for part in found.several:
        # The rest of a step is communication, which is the same in the prediction.
        errors = [
            abs(unseen - row.compute_s) / row.step_s
            for row, unseen in zip(several, time.unseen[len(rows) :].tolist(), strict=True)
            if row.ranks == part.ranks
        ]
        count = sum(each > 0 for each in part.s)
        on.append(OnRanks(part.ranks, count, float(np.median(errors)) if errors else None, _median_watts(part.watts)))
    return Refit(len(rows), time.factors, growth.factors, time_errors, _errors(growth, grown), tuple(on), fits_ranks)


def includes_ranks(without: Sequence[float], with_ranks: Sequence[float]) -> bool:
    """Return True if steps on several ranks count in the fit: if they are then predicted better, and others no worse.

    ``without``, ``with_ranks``: median errors of unseen networks (on one core, on several ranks), by a fit without and
    with steps on several ranks.
    """
    return with_ranks[1] < BETTER * without[1] and BETTER * with_ranks[0] <= without[0]


def _median_watts(found: Sequence[float]) -> float | None:
    known = [watts for watts in found if watts > 0]
    return float(np.median(known)) if known else None


def _rank_rows(
    measure: HardwareMeasure, positions: Mapping[int, int], near: LinkSpeed | None, memory_cores: float | None
) -> list[_RankRow]:
    """Return the networks on several ranks whose computing time is known.

    It is the time with which the model of a step, with a ring within the node, predicts the measured time. Networks in
    which less than ``LEAST_COMPUTING`` of the step is computing are left out. ``positions``: for each network that was
    measured on one core, its position among these.
    """
    assert measure.structures is not None, "checked before"
    core, found = catalogue.cpu("cpu", 1.0), list[_RankRow]()
    bandwidth_Bps = core.peer_bandwidth_Bps if near is None else near.bandwidth_Bps
    latency_s = SHARED_MEMORY_LATENCY_S if near is None else max(SHARED_MEMORY_LATENCY_S, near.latency_s)
    link = Link(latency_s, bandwidth_Bps, core.memory_bandwidth_Bps / 3)
    nets = structures(len(measure.structures.s))
    for part in measure.structures.several:
        use = CoreUse(1.0, part.ranks, float(measure.node_cores), memory_cores=memory_cores)
        for i, step_s in zip(on_ranks(len(nets)), part.s, strict=False):
            workload, batch = workload_of(nets[i]), nets[i].batches[0]
            compute_s = _computing_s(workload, part.ranks, link, step_s)
            if i not in positions or compute_s < LEAST_COMPUTING * step_s or not step_s:
                continue
            # Ranks that compute at the same time share the memory bandwidth of the node.
            terms = {
                name: seconds / (use.memory_part if name.endswith("_B") else 1.0)
                for name, seconds in time_terms(workload, batch).items()
            }
            found.append(_RankRow(positions[i], part.ranks, terms, compute_s, step_s))
    return found


def _computing_s(workload: Workload, ranks: int, link: Link, step_s: float) -> float:
    """Return the computing seconds with which a step on ``ranks`` ranks of a node is predicted to take ``step_s``."""
    low, high = 0.0, step_s
    for _ in range(40):  # the predicted time rises with the computing time
        middle = (low + high) / 2
        overlap = OVERLAP_EFFICIENCY["cpu"]
        timing = step(middle, 0.0, "Ring", workload.gradient_nbytes, ranks, link, overlap, 0.0, 0.0, nodes=1)
        low, high = (middle, high) if timing.step_s < step_s else (low, middle)
    return low


def time_terms(workload: Workload, batch: int) -> dict[str, float]:
    """Return the seconds of each term of a step on a core of the catalogue, if its factor is 1."""
    terms = {**structure.host_terms(workload), **structure.time_terms(workload, batch)}
    return _scaled(terms, structure.UNIT_S)


def _scaled(terms: Mapping[str, float], units: Mapping[str, float]) -> dict[str, float]:
    return {name: units[name] * amount for name, amount in terms.items()}


@dataclass(frozen=True)
class _Scored:
    """Factors that fit all networks; amounts of each that fits to the others predict, and without a fit."""

    factors: TermFactors
    unseen: Floats
    by_sheet: Floats
    by_probe: Floats


@dataclass(frozen=True)
class _Before:
    """Factors of units by term, without a fit: by data sheets, by the reference networks, and the most likely ones."""

    sheet: Mapping[str, float]
    probe: Mapping[str, float]
    likely: Mapping[str, float]


def _before(
    constants: Mapping[str, float], units: Mapping[str, float], speed: Mapping[str, float] | None = None
) -> _Before:
    """Return the factors of ``units`` without a fit.

    ``constants``: those of this release, 0 for terms that it does not count. ``speed``: factors of the constants by the
    reference networks; None: 1.
    """
    speed = speed or dict.fromkeys(units, 1.0)
    sheet = {name: constants[name] / units[name] for name in units}
    probe = {name: speed[name] * sheet[name] for name in units}
    return _Before(sheet, probe, {name: speed[name] if constants[name] else UNKNOWN for name in units})


def _scored(
    terms: list[dict[str, float]],
    amounts: Floats,
    before: _Before,
    spread: float,
    noise: float,
    margin: float | None = None,
    networks: NDArray[np.int64] | None = None,
    fitted: int | None = None,
) -> _Scored:
    """Return the factors of the terms that fit all rows, and the amounts of rows by fits to other networks.

    ``terms``: predicted part of each term, by row. ``amounts``: measured sums. ``spread``: standard deviation of the
    logarithms of factors. ``noise``: that of measurements. ``margin``: factor on predictions that must cover
    ``COVERED`` of the unseen networks. If it does not, all factors are increased. ``networks``: number of the network
    of each row; None: each row is another network. ``fitted``: number of the first rows that count in the fit; None:
    all.
    """
    names = list(terms[0])
    parts = np.array([[row[name] for name in names] for row in terms])
    sheet, probe, likely = (
        np.array([found[name] for name in names]) for found in (before.sheet, before.probe, before.likely)
    )

    def fit(rows: Floats, measured: Floats) -> Floats:
        def predicted(logs: Floats) -> Floats:
            return np.asarray(np.log(rows @ (likely * np.exp(logs))))

        logs = map_estimate(predicted, np.log(measured), np.full(len(names), spread), noise)
        return np.asarray(likely * np.exp(logs))

    fold = (np.arange(len(amounts)) if networks is None else networks) % FOLDS
    counts = np.arange(len(amounts)) < (len(amounts) if fitted is None else fitted)
    unseen = np.zeros(len(amounts))
    for each in range(FOLDS):
        others = counts & (fold != each)
        unseen[fold == each] = parts[fold == each] @ fit(parts[others], amounts[others])
    increase = 1.0 if margin is None else max(1.0, float(np.quantile(amounts / unseen, COVERED)) / margin)
    factors = (increase * fit(parts[counts], amounts[counts])).tolist()
    return _Scored(tuple(zip(names, factors, strict=True)), increase * unseen, parts @ sheet, parts @ probe)


def _median(forecast: Floats, amounts: Floats) -> float:
    return float(np.median(np.abs(forecast / amounts - 1)))


def _errors(found: _Scored, amounts: Floats) -> Errors:
    """Return the errors of the first rows, on one core. ``amounts``: what was measured there."""
    first = len(amounts)
    return Errors(
        sheet=_median(found.by_sheet[:first], amounts),
        probe=_median(found.by_probe[:first], amounts),
        refit=_median(found.unseen[:first], amounts),
        deviation=float(np.sqrt(np.mean(np.log(found.unseen[:first] / amounts) ** 2))),
    )
