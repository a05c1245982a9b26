"""Compute times of one device become points of its profile."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from statistics import median

from dljob.calibrate.learned import Learned, LearnedPoint
from dljob.perf.fit.fitting import agreeing

MAX_POINTS = 64
MEMORY = 200
"""Observations that a point remembers at most: later ones always weigh something, so that a change is followed."""
ABSURD = 100.0
"""A measurement so many times faster or slower than expected is an error, not a device."""
_SHORTEST_S, _LONGEST_S = 1e-7, 1e5


@dataclass(frozen=True)
class Measured:
    """Compute time of a step, the mean over ``steps`` of them."""

    batch: int
    compute_s: float
    steps: int = 1


def believable(measured: Measured) -> bool:
    """Whether it can be a measurement at all: finite, positive, of at least one sample."""
    s = measured.compute_s
    return isfinite(s) and _SHORTEST_S <= s <= _LONGEST_S and measured.batch >= 1 and measured.steps >= 1


def without_outliers(measured: Iterable[Measured], expected_s: Callable[[int], float] | None = None) -> list[Measured]:
    """The measurements that agree with each other and, within a factor ``ABSURD``, with ``expected_s`` of a batch.

    What disagrees with most of the others goes, whatever its size (``fitting.agreeing``).
    """
    found = [m for m in measured if believable(m)]
    if expected_s is not None:
        found = [m for m in found if abs(log(m.compute_s / expected_s(m.batch))) <= log(ABSURD)]
    kept = agreeing([(m.batch, m.compute_s) for m in found])
    return [m for m, keep in zip(found, kept, strict=True) if keep]


def in_session(steady: Sequence[Measured], probes: Sequence[Measured]) -> list[Measured]:
    """Probes and steady steps of one run as one set.

    A probe runs before the job is under load, so it is off by a factor that its batches share: the ratio of steady to
    probed time where both were measured. Probes are scaled by it; steady steps count as they are.
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
) -> Learned:
    """The constants after one run more.

    ``steady``: steps of the run itself; ``probes``: short timings before it. ``expected_s``: what the catalogue says of
    a batch, against measurements that are nonsense. ``fetch_s``: of a sample. Equal batches are averaged in the
    logarithm, by their number of observations. What cannot be right changes nothing.
    """
    session = in_session([m for m in steady if believable(m)], [m for m in probes if believable(m)])
    points = {p.batch: p for p in before.points}
    by_batch: dict[int, list[Measured]] = {}
    for m in without_outliers(session, expected_s):
        by_batch.setdefault(m.batch, []).append(m)
    for batch, group in by_batch.items():
        new_s, steps = median(m.compute_s for m in group), min(MEMORY, sum(m.steps for m in group))
        points[batch] = _merged(points.get(batch), LearnedPoint(batch, new_s, steps))
    return Learned(
        points=_bounded(sorted(points.values(), key=lambda p: p.batch)),
        fetch_s=_moved(before.fetch_s, fetch_s, 1e-9, 1e4),
        link_latency_s=_moved(before.link_latency_s, link_latency_s, 1e-7, 10.0),
        link_bandwidth_Bps=_moved(before.link_bandwidth_Bps, link_bandwidth_Bps, 1e3, 1e13),
    )


def _merged(old: LearnedPoint | None, new: LearnedPoint) -> LearnedPoint:
    """Both, weighted by observations; of the old one's at most half of ``MEMORY`` count."""
    if old is None:
        return new
    w = min(old.observations, MEMORY // 2)
    mean = (w * log(old.compute_s) + new.observations * log(new.compute_s)) / (w + new.observations)
    return LearnedPoint(new.batch, exp(mean), min(MEMORY, w + new.observations))


def _moved(old: float | None, new: float | None, least: float, most: float) -> float | None:
    """Half-way from the old to the new value, in the logarithm; the old one when the new one is none."""
    if new is None or not isfinite(new) or not least <= new <= most:
        return old
    return new if old is None or not least <= old <= most else (old * new) ** 0.5


def _bounded(points: list[LearnedPoint]) -> tuple[LearnedPoint, ...]:
    """At most ``MAX_POINTS``: of the closest two batches (by ratio) the less observed one goes; the ends stay."""
    while len(points) > MAX_POINTS:
        inner = range(1, len(points) - 1)
        i = min(
            inner,
            key=lambda i: (log(points[i + 1].batch / points[i - 1].batch), points[i].observations),
        )
        points = points[:i] + points[i + 1 :]
    return tuple(points)
