"""Predicted compute times of a GPU on which a model never ran, from measurements on other GPUs.

For one model, the catalogue has similar errors on all devices (kernels below peak, a slow host). Measurements on
another device therefore predict better than a data sheet alone; see ``perf.fit.new_device``.
"""

from collections.abc import Mapping
from math import sqrt

from dljob.calibrate.learned import Learned, LearnedPoint
from dljob.cluster import catalogue
from dljob.cluster.catalogue import Device
from dljob.perf.fit.new_device import Point, Sheet, seconds
from dljob.perf.step.compute import arithmetic_FLOPs
from dljob.perf.workload.workload import Workload

DEVICE_SPREAD = 0.2
"""Standard deviation of log(measured / predicted) if all other devices were measured. Leave-one-device-out errors are
12 % (NeuSight, six other devices) and 22 % (Gavel, two others) in the mean."""
MAX_BATCHES = 8
"""Maximum number of batches used of each device; more add little information."""


def carried(
    profile: str, label: str, workload: Workload, learned: Mapping[tuple[str, str], Learned]
) -> tuple[list[tuple[int, float]], float]:
    """Return predicted (batch, seconds) points of the device and the standard deviation of their logarithm.

    There are no points if no other device was measured. ``label``: the device's label on nodes. Only GPUs in the
    catalogue are used.
    """
    asked = catalogue.gpu(label)
    others = {
        name: (device, found.points)
        for (key, name), found in sorted(learned.items())
        if key == profile and name != label and found.points and (device := catalogue.gpu(name)) is not None
    }
    if asked is None or not others:
        return [], 0.0
    sheets = {name: _sheet(workload, device) for name, (device, _) in others.items()}
    sheets[label] = _sheet(workload, asked)
    known = {
        Point(name, "", float(point.batch)): point.compute_s
        for name, (_, points) in others.items()
        for point in _thinned(points)
    }
    batches = sorted({int(point.batch) for point in known})
    found_s = seconds(sheets, known, [Point(label, "", float(b)) for b in batches])
    return list(zip(batches, found_s.tolist(), strict=True)), DEVICE_SPREAD * sqrt(1 + 1 / len(others))


def _sheet(workload: Workload, device: Device) -> Sheet:
    return Sheet(arithmetic_FLOPs(workload, device), device.memory_bandwidth_Bps, catalogue.vendor(device.name))


def _thinned(points: tuple[LearnedPoint, ...]) -> list[LearnedPoint]:
    """Return at most ``MAX_BATCHES`` points, spread evenly over the measured ones, with both ends."""
    if len(points) <= MAX_BATCHES:
        return list(points)
    last = len(points) - 1
    return [points[round(i * last / (MAX_BATCHES - 1))] for i in range(MAX_BATCHES)]
