"""Choose local batch sizes (shares) from speeds measured while a job runs; decide if a change is worthwhile. No I/O.

A rank with a local batch size of ``share`` needs ``fixed_s + per_sample_s * share`` seconds for a step. The step time
is that of the slowest rank.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import floor
from statistics import median

HYSTERESIS = 0.15
"""Minimum relative reduction of the compute time that justifies new shares (local batch sizes). A smaller
reduction may be noise of a short probe."""


UNLIKE = 3.0
"""Ratio of the slowest to the fastest probe of identical devices from which they count as different.

If three ranks share two cores, two of them may have the same core during the whole probe, and then take twice as long
as the third. Another node's processes add to this: a ratio of 2 is no evidence that a node is slower. A smaller
difference that lasts is found while training, from 20 steps or more (``dltrain.elastic.balance``)."""


def apportion(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split ``total`` into integers in proportion to ``weights``, such as a batch into the samples of each rank.

    The integers sum to ``total``. They follow from the largest remainder method. In a tie, the lower index gets more.
    """
    whole = sum(weights)
    assert whole > 0, "at least one weight must be positive"
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


@dataclass(frozen=True)
class Speed:
    fixed_s: float
    per_sample_s: float

    def step_s(self, share: int) -> float:
        return self.fixed_s + self.per_sample_s * share


def fit(points: Sequence[tuple[int, float]]) -> Speed:
    """Fit a line to points (local batch size, seconds of a step) by least squares, with non-negative coefficients.

    If all points have the same batch size, or if least squares would give a negative coefficient, the line goes through
    the origin (``fixed_s`` is 0) and the mean of the points.
    """
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else mean_y / mean_x
    if slope <= 0 or mean_y < slope * mean_x:
        return Speed(0.0, mean_y / mean_x)
    return Speed(mean_y - slope * mean_x, slope)


def of_identical(speeds: Sequence[Speed], kinds: Sequence[Hashable], share: int) -> tuple[Speed, ...]:
    """Return the speeds, with the median speed of its kind for each rank, so that identical devices start equal.

    Start-up probes run beside each other for less than a second, so they differ by chance. Ranks of a kind keep their
    own speeds if the slowest takes at least ``UNLIKE`` times as long as the fastest. ``kinds``: a value for each rank
    that is equal for identical devices, such as the device type. ``share``: local batch size at which times are
    compared.
    """
    common: dict[Hashable, Speed | None] = {}
    for kind in kinds:
        own = [speed for speed, other in zip(speeds, kinds, strict=True) if other == kind]
        times = [speed.step_s(share) for speed in own]
        middle = Speed(median(speed.fixed_s for speed in own), median(speed.per_sample_s for speed in own))
        common[kind] = middle if max(times) < UNLIKE * min(times) else None
    return tuple(common[kind] or speed for speed, kind in zip(speeds, kinds, strict=True))


def balanced(speeds: Sequence[Speed], batch: int, limits: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return local batch sizes (shares) of at least 1 that sum to ``batch`` and minimize the slowest rank's time.

    If several ranks would need the same time with one more sample, the rank with the lowest number gets the sample.
    ``limits``: the maximum share of each rank, with a sum of at least ``batch``; None: no limits. ``speeds``: the
    measured speed of each rank.
    """
    limits = limits or [batch] * len(speeds)
    assert batch >= len(speeds) and sum(limits) >= batch, (
        "the batch must have a sample for each rank and fit the limits"
    )
    low, high = 0.0, max(speed.step_s(batch) for speed in speeds)
    for _ in range(60):  # Bisect the time T in which all ranks together process the batch.
        middle = (low + high) / 2
        if sum(_filled(speed, middle, limit) for speed, limit in zip(speeds, limits, strict=True)) <= batch:
            low = middle
        else:
            high = middle
    shares = [_filled(speed, low, limit) for speed, limit in zip(speeds, limits, strict=True)]
    while sum(shares) < batch:
        free = (r for r in range(len(speeds)) if shares[r] < limits[r])
        shares[min(free, key=lambda r: (speeds[r].step_s(shares[r] + 1), r))] += 1
    return tuple(shares)


def _filled(speed: Speed, step_s: float, limit: int) -> int:
    return min(limit, max(1, floor((step_s - speed.fixed_s) / speed.per_sample_s)))


def worthwhile(
    speeds: Sequence[Speed],
    now: Sequence[int],
    batch: int,
    *,
    gain: float = HYSTERESIS,
    limits: Sequence[int] | None = None,
) -> tuple[int, ...] | None:
    """Return better local batch sizes than ``now``, or None if the slowest rank's time would hardly change.

    Better local batch sizes reduce this time by more than the fraction ``gain``. ``now``: the current local batch
    sizes. ``batch``: the global batch size. ``limits``: the maximum local batch size of each rank; None: no limits.
    ``speeds``: the measured speed of each rank.
    """
    better = balanced(speeds, batch, limits)

    def slowest(shares: Sequence[int]) -> float:
        return max(speed.step_s(share) for speed, share in zip(speeds, shares, strict=True))

    return better if slowest(better) < (1 - gain) * slowest(now) else None
