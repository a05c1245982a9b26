"""A device on which little or nothing was measured, from the same workloads on other devices.

log t(workload, batch, device) is a sum of normal effects, so the best prediction is a Gaussian process' mean:

- the workload and batch, unknown (flat);
- minus 0.4 of log peak and 0.6 of log bandwidth of the device, between the roofline's two sides. Twice the speed of
  both halves the time, give or take ``SUM_SPREAD``; which of the two counts more is left to the data
  (``DIFFERENCE_SPREAD``);
- a slope of its own for each workload, alike for near batches: a small batch waits for its host on every device;
- the device (its architecture), the device with the workload, and with the workload near a batch. Devices with alike
  sheets share nine tenths of these: what two of a family say is one opinion, not two;
- the vendor with the workload, and near a batch: what a vendor's libraries make of a workload all its devices share.

Probes on the new device are observations like any other.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dljob.perf.fit.fitting import Floats, checked

PEAK_PART, BANDWIDTH_PART = 0.4, 0.6
SUM_SPREAD, DIFFERENCE_SPREAD = 0.1, 0.25
SLOPE_SPREAD, SLOPE_DOUBLINGS = 0.1, 4.0
DEVICE_SPREAD, PAIR_SPREAD = 0.4, 0.1
NEAR_SPREAD, NEAR_DOUBLINGS = 0.1, 1.0
VENDOR_SPREAD, VENDOR_NEAR_SPREAD = 0.5, 0.2
LIKENESS, OWN_PART = 0.5, 0.1
"""Distance of two sheets' logarithms at which devices are hardly alike, and what is a device's own in any case."""
REPEAT_NOISE, TAIL = 0.05, 4.0
FLAT = 5.0
"""Standard deviation of what is not known at all, in the logarithm.

The spreads above are round numbers. Those of device and vendor are what leaving NeuSight's devices out one by one
chooses nearly always, whichever further device is kept away from the choice (docs/design/0013); the parts of peak and
bandwidth were 0.5 each, Gavel's devices moved them, NeuSight's agree. Likeness of 0.3 to 0.5 is the best on NeuSight,
0.8 on Gavel."""


@dataclass(frozen=True)
class Sheet:
    """What a data sheet says of a device."""

    peak_FLOPs: float
    bandwidth_Bps: float
    vendor: str = ""
    """Whose libraries it runs; devices without one are of the same."""

    def __post_init__(self) -> None:
        figures = self.peak_FLOPs, self.bandwidth_Bps
        checked(f"peak {self.peak_FLOPs:g} FLOP/s, bandwidth {self.bandwidth_Bps:g} B/s", figures)


@dataclass(frozen=True)
class Point:
    """A workload and batch on a device."""

    device: str
    workload: str
    batch: float


def seconds(sheets: Mapping[str, Sheet], known: Mapping[Point, float], asked: Sequence[Point]) -> Floats:
    """Step seconds of the points ``asked``, from the ``known`` ones.

    Raises ValueError naming a device without a sheet, a time that is not finite and above 0, or a workload of which
    nothing is known on any device.
    """
    points = _points(sheets, known, asked)
    times = checked("known seconds", list(known.values()))
    logs = _logs(sheets, points)
    prior = -logs @ np.array([PEAK_PART, BANDWIDTH_PART])
    prior += np.median(np.log(times) - prior[: len(known)])
    covariance = _covariance(points, logs, _vendors(sheets, points))
    n = len(known)
    residuals = np.log(times) - prior[:n]
    inner = covariance[:n, :n] + np.diag(_noise(covariance[:n, :n], residuals))
    return np.asarray(np.exp(prior[n:] + covariance[n:, :n] @ np.linalg.solve(inner, residuals)))


def _noise(covariance: Floats, residuals: Floats) -> Floats:
    """Variance of each measurement's noise: more where the others, without it, find it hard to believe.

    Student's t with ``TAIL`` degrees of freedom, by reweighting (Lange et al. 1989) on leave-one-out residuals, which
    the inverse of the covariance gives for all points at once (Rasmussen, Williams 2006, eq. 5.12).
    """
    noise = np.full(len(residuals), REPEAT_NOISE**2)
    for _ in range(3):
        inverse = np.linalg.inv(covariance + np.diag(noise))
        variance = 1.0 / np.diag(inverse)
        surprise = (inverse @ residuals * variance) ** 2 / variance
        excess = np.maximum((TAIL + surprise) / (TAIL + 1.0) - 1.0, 0.0)
        noise = REPEAT_NOISE**2 + excess * variance
    return noise


def next_probe(sheets: Mapping[str, Sheet], known: Collection[Point], candidates: Sequence[Point]) -> Point:
    """Which of the ``candidates`` to measure: the one that tells the most of the others. Errors as above.

    That is, the one that explains the largest part of each other candidate's variance, on average: cov(i, j)² / (var(i)
    (var(j) + noise)). Parts rather than variances, so that a few of which next to nothing is known do not decide alone.
    Variances do not depend on measured values, so that a series of probes can be chosen before the first is taken.
    """
    points = _points(sheets, known, candidates)
    covariance = _covariance(points, _logs(sheets, points), _vendors(sheets, points))
    n = len(known)
    inner = covariance[:n, :n] + REPEAT_NOISE**2 * np.eye(n)
    left = covariance[n:, n:] - covariance[n:, :n] @ np.linalg.solve(inner, covariance[:n, n:])
    variance = np.diag(left)
    explained = left**2 / variance[:, None] / (variance + REPEAT_NOISE**2)[None, :]
    return candidates[int(np.argmax(explained.sum(axis=0) - np.diag(explained)))]


def _points(sheets: Mapping[str, Sheet], known: Collection[Point], asked: Sequence[Point]) -> list[Point]:
    """Known and asked ones, checked."""
    if not known or not asked:
        raise ValueError(f"{len(known)} known and {len(asked)} asked points: expected at least one of each")
    points = [*known, *asked]
    for point in points:
        if point.device not in sheets:
            raise ValueError(
                f"device {point.device}: not in the catalogue ({', '.join(sorted(sheets))}); add its sheet"
            )
    strangers = {p.workload for p in asked} - {p.workload for p in known}
    if strangers:
        raise ValueError(f"workload {min(strangers)}: measured on no device; measure one batch on any")
    return points


def _logs(sheets: Mapping[str, Sheet], points: Sequence[Point]) -> Floats:
    """Logarithms of peak and bandwidth of each point's device, about their mean."""
    logs = np.log([[sheets[p.device].peak_FLOPs, sheets[p.device].bandwidth_Bps] for p in points])
    return np.asarray(logs - logs.mean(axis=0))


def _vendors(sheets: Mapping[str, Sheet], points: Sequence[Point]) -> list[str]:
    return [sheets[p.device].vendor for p in points]


def _covariance(points: Sequence[Point], logs: Floats, vendors: Sequence[str]) -> Floats:
    """Of the logarithm of every two points' times."""
    device, workload = (np.array([getattr(p, name) for p in points]) for name in ("device", "workload"))
    batch = np.log2(checked("batch", [p.batch for p in points]))
    apart = np.abs(batch[:, None] - batch[None, :])
    same_device, same_workload = device[:, None] == device[None, :], workload[:, None] == workload[None, :]
    same_vendor = np.array(vendors)[:, None] == np.array(vendors)[None, :]
    total, difference = logs.sum(axis=1) / np.sqrt(2), (logs[:, 0] - logs[:, 1]) / np.sqrt(2)
    sheets_apart = ((logs[:, None, :] - logs[None, :, :]) ** 2).sum(axis=2)
    kin = OWN_PART * same_device + (1 - OWN_PART) * np.exp(-0.5 * sheets_apart / LIKENESS**2)
    alike, near = (np.exp(-0.5 * (apart / doublings) ** 2) for doublings in (SLOPE_DOUBLINGS, NEAR_DOUBLINGS))
    return np.asarray(
        FLAT**2 * (1.0 + same_workload + (same_workload & (apart == 0)))
        + SUM_SPREAD**2 * np.outer(total, total)
        + DIFFERENCE_SPREAD**2 * np.outer(difference, difference)
        + SLOPE_SPREAD**2 * same_workload * alike * (logs @ logs.T)
        + DEVICE_SPREAD**2 * kin
        + same_workload * kin * (PAIR_SPREAD**2 * alike + NEAR_SPREAD**2 * near)
        + same_workload * same_vendor * (VENDOR_SPREAD**2 * alike + VENDOR_NEAR_SPREAD**2 * near)
    )
