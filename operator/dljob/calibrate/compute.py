"""Calibration of one-device compute times: measurements become points of the device's profile."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import copysign, exp, isfinite, log
from statistics import median

from dljob.calibrate.learned import Learned, LearnedPoint
from dljob.perf.fit.fitting import OUTLIER, agreeing

MAX_POINTS = 64
MEMORY = 200
"""Maximum number of observed steps of a point (the mean compute time at one batch size) that count in its mean.

Because of this limit, later measurements keep some weight.
"""
RUN_STEPS = 50
"""Maximum number of observed steps of one run that count at one batch size. What disturbs a run, such as a neighbour on
the machine, disturbs its ranks together, so more ranks are not more evidence."""
DISTURBED = 1.25
"""Factor between a run and a stored time of several runs from which the run counts as disturbed. Equal runs on shared
machines differ by 1.1 at the median (``repeats``), a standard deviation of 0.14 of the logarithm. The factor is 1.5
standard deviations, as is usual for Huber's limit."""
_DOUBT = 3
"""Number of stored observations that each step of a disturbed run cancels. One run of ``RUN_STEPS`` thereby lowers the
evidence of any history to that of a single run."""
MAX_RUNS = 4
"""Maximum number of runs that count in the mean of a constant without a number of observations (``_moved``)."""
ABSURD = 100.0
"""Maximum factor between a measured and an expected time. A measurement that differs more counts as an error."""
_SHORTEST_S, _LONGEST_S = 1e-7, 1e5


@dataclass(frozen=True)
class Measured:
    """A measurement in one run: ``compute_s``, the mean compute time in seconds of ``steps`` steps on one device.

    ``batch``: number of samples on the device in each step.
    """

    batch: int
    compute_s: float
    steps: int = 1


def believable(measured: Measured) -> bool:
    """Return True if the time is from 1e-7 to 1e5 seconds, and the batch and the number of steps are at least 1."""
    s = measured.compute_s
    return isfinite(s) and _SHORTEST_S <= s <= _LONGEST_S and measured.batch >= 1 and measured.steps >= 1


def without_outliers(measured: Iterable[Measured], expected_s: Callable[[int], float] | None = None) -> list[Measured]:
    """Return the measurements without outliers, in the same order.

    An outlier is a measurement that is not ``believable``, differs from ``expected_s(batch)`` by more than a factor
    ``ABSURD``, or disagrees with most other measurements (``fitting.agreeing``). ``expected_s``: function from a batch
    to its expected seconds; None: do not compare with expected times.
    """
    found = [m for m in measured if believable(m)]
    if expected_s is not None:
        found = [m for m in found if abs(log(m.compute_s / expected_s(m.batch))) <= log(ABSURD)]
    kept = agreeing([(m.batch, m.compute_s) for m in found])
    return [m for m, keep in zip(found, kept, strict=True) if keep]


def in_session(steady: Sequence[Measured], probes: Sequence[Measured]) -> list[Measured]:
    """Return the measurements of a run: its steady steps, and its probes of other batches with corrected times.

    Steady steps are those of the training itself. Probes are short timings before it, when the device is not yet under
    load, so all probes of a run are wrong by a common factor. The factor is the median of (steady time / probed time)
    over the batches that have both. Probes of batches that have steady steps are then left out. If no batch has both,
    return all probes with unchanged times.
    """
    pairs = [log(s.compute_s / p.compute_s) for s in steady for p in probes if s.batch == p.batch]
    if not pairs:
        return [*steady, *probes]
    offset = exp(median(pairs))
    measured = {s.batch for s in steady}
    return [*steady, *(Measured(p.batch, p.compute_s * offset, p.steps) for p in probes if p.batch not in measured)]


def learn(
    before: Learned,
    steady: Iterable[Measured] = (),
    probes: Iterable[Measured] = (),
    link_latency_s: float | None = None,
    link_bandwidth_Bps: float | None = None,
    expected_s: Callable[[int], float] | None = None,
    fetch_s: float | None = None,
    cores: int | None = None,
    ranks: int = 1,
    computing_W: float | None = None,
    machine_nodes: int = 1,
    start_s: float | None = None,
) -> Learned:
    """Return the one-device and link constants in ``before``, updated with the measurements of one more run.

    These are the compute times on one device, the seconds to prepare a sample and to start a job, and the latency and
    bandwidth of links.
    All other fields of the result have their defaults, so the caller must copy them from ``before``.

    ``steady``: measured steps of the training itself. ``probes``: short timings before the training. ``expected_s``:
    function from a batch to the seconds that the device catalogue predicts, to reject absurd measurements. ``fetch_s``:
    measured seconds to prepare a sample. ``computing_W``: measured power in watts of one device (of one CPU on CPU
    nodes) while it computes. ``link_latency_s``, ``link_bandwidth_Bps``: measured latency and bandwidth of links.
    ``start_s``: measured seconds of the job's start. None for these five: not measured. ``cores``: CPUs of each rank in
    the run; None on GPUs. ``ranks``: ranks on each CPU node of the run. ``machine_nodes``: nodes of the run on one
    machine, whose cores they shared. Points that were measured with other ``cores``, ``ranks`` or ``machine_nodes``
    stay as they are.

    If the run has several times for one batch, their median counts, as at most ``RUN_STEPS`` observed steps. Its
    logarithm is averaged with that of the time in ``before``, weighted by the numbers of observed steps (``_merged``).
    The other constants are means over runs (``_moved``). Impossible values are ignored.
    """
    session = in_session([m for m in steady if believable(m)], [m for m in probes if believable(m)])
    points = {_key(p): p for p in before.points}
    by_batch: dict[int, list[Measured]] = {}
    for m in without_outliers(session, expected_s):
        by_batch.setdefault(m.batch, []).append(m)
    for batch, group in by_batch.items():
        new_s, steps = median(m.compute_s for m in group), min(RUN_STEPS, sum(m.steps for m in group))
        new = LearnedPoint(batch, new_s, steps, cores, ranks, machine_nodes)
        points[_key(new)] = _merged(points.get(_key(new)), new, expected_s)
    runs = 1 + (before.repeats.runs if before.repeats else 0)
    return Learned(
        points=_bounded(sorted(points.values(), key=_key)),
        fetch_s=_moved(before.fetch_s, fetch_s, runs, 1e-9, 1e4),
        computing_W=_moved(before.computing_W, computing_W, runs, 1e-2, 1e5),
        start_s=_moved(before.start_s, start_s, runs, 1e-1, 86400.0),
        link_latency_s=_moved(before.link_latency_s, link_latency_s, runs, 1e-7, 10.0),
        link_bandwidth_Bps=_moved(before.link_bandwidth_Bps, link_bandwidth_Bps, runs, 1e3, 1e13),
    )


def _merged(
    old: LearnedPoint | None, new: LearnedPoint, expected_s: Callable[[int], float] | None = None
) -> LearnedPoint:
    """Return the geometric mean of two points of the same batch, weighted by their numbers of observed steps.

    Return ``new`` if ``old`` is None. Also return ``new`` if the two differ by more than a factor ``OUTLIER``, ``new``
    is nearer to ``expected_s``, and ``old`` is further from it than this factor, because a wrong ``old`` would distort
    the mean for many runs.

    If the two differ by more than a factor ``DISTURBED``, one run cannot show whether it was disturbed or the device
    has changed. Against a history of more than one run (``RUN_STEPS``), the difference then counts as ``DISTURBED``
    only (Huber 1964), so that the run has little influence. The stored number of observations falls instead of rising,
    so that the next run has more weight: it confirms the change, or it corrects the mean. This is the forgetting of
    adaptive filters, which after an unexpected innovation trust the state less (Fortescue, Kershenbaum, Ydstie 1981).
    """
    if old is None:
        return new
    difference = log(new.compute_s / old.compute_s)
    if expected_s is not None and abs(difference) > log(OUTLIER):
        old_off, new_off = (abs(log(p.compute_s / expected_s(p.batch))) for p in (old, new))
        if new_off < old_off and old_off > log(OUTLIER):
            return new
    stored, steps, limit = min(old.observations, MEMORY), new.observations, log(DISTURBED)
    observations = min(MEMORY, stored + steps)
    if abs(difference) > limit:
        observations = max(steps, min(stored, RUN_STEPS), stored - _DOUBT * steps)
        if stored > RUN_STEPS:
            difference = copysign(limit, difference)
    moved_s = old.compute_s * exp(difference * steps / (stored + steps))
    return replace(new, compute_s=moved_s, observations=observations)


def _key(point: LearnedPoint) -> tuple[int, int, int, int]:
    """Return (CPUs per rank or 0, ranks per node, nodes on one machine, batch).

    Measurements with equal keys are averaged into one point.
    """
    return point.cores or 0, point.ranks, point.machine_nodes, point.batch


def _moved(old: float | None, new: float | None, runs: int, least: float, most: float) -> float | None:
    """Return the geometric mean of the stored value ``old`` of ``runs`` runs and the measured value ``new`` of one.

    At most ``MAX_RUNS`` runs count, ``new`` included: an exponentially weighted mean, which a single disturbed run
    moves little, and which follows a lasting change within a few runs. A value is valid if it is from ``least`` to
    ``most``. If ``new`` is None or not valid, return ``old``, which may be None. Otherwise, if ``old`` is None or not
    valid, return ``new``.
    """
    if new is None or not isfinite(new) or not least <= new <= most:
        return old
    if old is None or not least <= old <= most:
        return new
    return exp(log(old) + log(new / old) / (min(runs, MAX_RUNS - 1) + 1))


def _bounded(points: list[LearnedPoint]) -> tuple[LearnedPoint, ...]:
    """Return at most ``MAX_POINTS`` of ``points``. If there are more, drop those that add the least information.

    ``points``: sorted by ``_key``. Of the points whose keys differ only in the batch, take the largest set. Drop its
    point whose two neighbours have the smallest ratio of batches, but not its first or last point. If this set has only
    two points, drop the point with the fewest observations of all points instead.
    """
    while len(points) > MAX_POINTS:
        kinds = [_key(point)[:-1] for point in points]
        most = max(kinds, key=kinds.count)
        begin, end = kinds.index(most), kinds.index(most) + kinds.count(most)
        inner = range(begin + 1, end - 1)
        if not inner:  # Every kind has at most two points.
            points.remove(min(points, key=lambda point: point.observations))
            continue
        i = min(
            inner,
            key=lambda i: (log(points[i + 1].batch / points[i - 1].batch), points[i].observations),
        )
        points = points[:i] + points[i + 1 :]
    return tuple(points)
