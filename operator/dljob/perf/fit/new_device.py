"""Prediction of step times on a device with few or no measurements, from the same workloads on other devices.

The logarithm of the step time t(workload, batch, device) is modelled as a sum of normally distributed effects. The best
prediction is then the mean of a Gaussian process. The effects are:

- a constant, the workload, and the workload with the batch. Each has a nearly flat prior;
- the device's data sheet: -0.4 log(peak operations per second) - 0.6 log(memory bandwidth), a compromise between the
  two sides of the roofline. Doubling both figures halves the time, up to an uncertainty of ``SUM_SPREAD``. The
  measurements decide which of the two figures matters more (``DIFFERENCE_SPREAD``);
- for each workload, a deviation of the slopes over peak and bandwidth, which is similar for batches of similar size.
  The time of a small batch depends less on the device, because it waits for the host anyway;
- the device (its architecture), the device with the workload, and the device with the workload near a batch. Devices
  with similar data sheets share nine tenths of these effects, so two devices of a family do not count as independent;
- the vendor with the workload, and the vendor with the workload near a batch: a vendor's devices share its libraries.

Measurements on the new device itself, if there are any, count like measurements on other devices.
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
"""Length scale of the similarity of two data sheets (in logarithms of their figures), and the fraction of a device
effect that similar devices do not share."""
REPEAT_NOISE, TAIL = 0.05, 4.0
FLAT = 5.0
"""Standard deviation of log(time) in a prior that is nearly flat.

The spreads above (standard deviations of effects on log(time)) are round numbers. They were chosen on two public sets
of measurements, NeuSight and Gavel. Leave-one-device-out validation on NeuSight nearly always selects these device and
vendor spreads, also if one more device is excluded (docs/design/0013). ``PEAK_PART`` and ``BANDWIDTH_PART`` were first
0.5 each and then fitted to Gavel's devices; NeuSight's devices agree. The best ``LIKENESS`` is 0.3 to 0.5 on NeuSight
and 0.8 on Gavel."""


@dataclass(frozen=True)
class Sheet:
    """Figures from a device's data sheet: peak operations per second, and memory bandwidth in bytes per second."""

    peak_FLOPs: float
    bandwidth_Bps: float
    vendor: str = ""
    """Vendor whose libraries the device uses. Devices with an empty vendor count as devices of the same vendor."""

    def __post_init__(self) -> None:
        figures = self.peak_FLOPs, self.bandwidth_Bps
        checked(f"peak {self.peak_FLOPs:g} FLOP/s, bandwidth {self.bandwidth_Bps:g} B/s", figures)


@dataclass(frozen=True)
class Point:
    """A combination of workload, batch and device whose step time is measured or predicted.

    ``device``, ``workload``: names. ``batch``: samples on the device.
    """

    device: str
    workload: str
    batch: float


def seconds(sheets: Mapping[str, Sheet], known: Mapping[Point, float], asked: Sequence[Point]) -> Floats:
    """Return predicted step seconds for the points ``asked``, from the measured seconds ``known``.

    ``sheets``: data sheet of each device, by name. Raise ValueError if a device has no sheet, if a time or a batch is
    not finite and above 0, if no known point has the workload of an asked point, or if ``known`` or ``asked`` is empty.
    """
    points = valid_points(sheets, known, asked)
    times = checked("known seconds", list(known.values()))
    logs = _logs(sheets, points)
    prior = -logs @ np.array([PEAK_PART, BANDWIDTH_PART])
    prior += np.median(np.log(times) - prior[: len(known)])
    covariance = covariance_of(sheets, points)
    n = len(known)
    residuals = np.log(times) - prior[:n]
    inner = covariance[:n, :n] + np.diag(_noise(covariance[:n, :n], residuals))
    return np.asarray(np.exp(prior[n:] + covariance[n:, :n] @ np.linalg.solve(inner, residuals)))


def _noise(covariance: Floats, residuals: Floats) -> Floats:
    """Return the noise variance of each measurement. Outliers get a larger variance.

    The noise has Student's t distribution with ``TAIL`` degrees of freedom, fitted by reweighting (Lange et al. 1989)
    on leave-one-out residuals. The inverse covariance gives these residuals for all points at once (Rasmussen, Williams
    2006, eq. 5.12).
    """
    noise = np.full(len(residuals), REPEAT_NOISE**2)
    for _ in range(3):
        inverse = np.linalg.inv(covariance + np.diag(noise))
        variance = 1.0 / np.diag(inverse)
        surprise = (inverse @ residuals * variance) ** 2 / variance
        excess = np.maximum((TAIL + surprise) / (TAIL + 1.0) - 1.0, 0.0)
        noise = REPEAT_NOISE**2 + excess * variance
    return noise


def valid_points(sheets: Mapping[str, Sheet], known: Collection[Point], asked: Sequence[Point]) -> list[Point]:
    """Return the known points, followed by the asked points.

    Raise ValueError if there are no known or no asked points, if ``sheets`` lacks a device, or if no known point has
    the workload of an asked point.
    """
    if not known or not asked:
        raise ValueError(
            f"points: found {len(known)} measured points and {len(asked)} points to predict; expected at least one "
            "measured point and one point to predict"
        )
    points = [*known, *asked]
    for point in points:
        if point.device not in sheets:
            raise ValueError(
                f"device {point.device}: found no data sheet of this device, only of {', '.join(sorted(sheets))}; "
                "expected one for each device. Add its data sheet"
            )
    strangers = {p.workload for p in asked} - {p.workload for p in known}
    if strangers:
        raise ValueError(
            f"workload {min(strangers)}: found no measured step time of this workload; expected one on at least one "
            "device. Measure one batch on any device"
        )
    return points


def _logs(sheets: Mapping[str, Sheet], points: Sequence[Point]) -> Floats:
    """Return log(peak) and log(bandwidth) of each point's device, minus the mean over all points; shape (points, 2)."""
    logs = np.log([[sheets[p.device].peak_FLOPs, sheets[p.device].bandwidth_Bps] for p in points])
    return np.asarray(logs - logs.mean(axis=0))


def covariance_of(sheets: Mapping[str, Sheet], points: Sequence[Point]) -> Floats:
    """Return the covariance matrix of log(time) at the points: the sum over all effects on the time.

    The module's docstring lists these effects. ``sheets``: data sheet of each device, by name.
    """
    logs, vendors = _logs(sheets, points), [sheets[p.device].vendor for p in points]
    device, workload = (np.array([getattr(p, name) for p in points]) for name in ("device", "workload"))
    batch = np.log2(checked("batch", [p.batch for p in points]))
    apart = np.abs(batch[:, None] - batch[None, :])
    same_device, same_workload = device[:, None] == device[None, :], workload[:, None] == workload[None, :]
    same_vendor = np.array(vendors)[:, None] == np.array(vendors)[None, :]
    total, difference = logs.sum(axis=1) / np.sqrt(2), (logs[:, 0] - logs[:, 1]) / np.sqrt(2)
    sheets_apart = ((logs[:, None, :] - logs[None, :, :]) ** 2).sum(axis=2)
    kin = OWN_PART * same_device + (1 - OWN_PART) * np.exp(-0.5 * sheets_apart / LIKENESS**2)
    slope_kernel, near = (np.exp(-0.5 * (apart / doublings) ** 2) for doublings in (SLOPE_DOUBLINGS, NEAR_DOUBLINGS))
    return np.asarray(
        FLAT**2 * (1.0 + same_workload + (same_workload & (apart == 0)))
        + SUM_SPREAD**2 * np.outer(total, total)
        + DIFFERENCE_SPREAD**2 * np.outer(difference, difference)
        + SLOPE_SPREAD**2 * same_workload * slope_kernel * (logs @ logs.T)
        + DEVICE_SPREAD**2 * kin
        + same_workload * kin * (PAIR_SPREAD**2 * slope_kernel + NEAR_SPREAD**2 * near)
        + same_workload * same_vendor * (VENDOR_SPREAD**2 * slope_kernel + VENDOR_NEAR_SPREAD**2 * near)
    )
