"""Compute times of a GPU on which a model never ran, carried over from GPUs on which it did.

The catalogue errs alike on all devices for one model (kernels that do not reach the peak, a slow host), so what was
measured on another device says more than a data sheet alone; ``perf.newdevice`` says how much more.
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
"""Standard deviation of the logarithm of (measured / carried over), were all other devices known: devices left out of
NeuSight's and Gavel's measurements one by one are 12 and 22 % off in the mean with six and two others known."""
MAX_BATCHES = 8
"""Of each device; they say little that is new beyond."""


def carried(
    profile: str, label: str, workload: Workload, learned: Mapping[tuple[str, str], Learned]
) -> tuple[list[tuple[int, float]], float]:
    """(batch, seconds) points of the device, and the spread of their logarithm; no points when nothing tells of them.

    ``label``: the device's as nodes have it. Only GPUs that the catalogue knows tell of each other.
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
    """At most ``MAX_BATCHES``, spread evenly over the measured ones, the ends among them."""
    if len(points) <= MAX_BATCHES:
        return list(points)
    last = len(points) - 1
    return [points[round(i * last / (MAX_BATCHES - 1))] for i in range(MAX_BATCHES)]
