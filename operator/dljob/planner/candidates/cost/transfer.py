"""Predict compute times on a GPU on which the model never ran, from measurements on other GPUs.

For one model, predictions from the catalogue have similar errors on all GPUs (kernels below peak, a slow host).
Measurements on another GPU therefore predict better than a data sheet alone. ``perf.fit.new_device`` has the formulas.
"""

from collections.abc import Mapping
from math import sqrt

from dljob.calibrate.learned import Learned, LearnedPoint
from dljob.cluster import catalogue
from dljob.cluster.catalogue import Device
from dljob.perf.fit.new_device import Point, Sheet, seconds
from dljob.perf.resources.power import slowed
from dljob.perf.step.compute import arithmetic_FLOPs
from dljob.perf.workload.workload import Workload

DEVICE_SPREAD = 0.2
"""Standard deviation of log(measured / predicted) of predicted times if the model was measured on many other devices.

The mean leave-one-device-out error is 12 % on NeuSight (six other devices) and 22 % on Gavel (two other devices)."""
MAX_BATCHES = 8
"""Maximum number of measured batches to use from each device. More would add little information."""


def carried(
    profile: str, label: str, workload: Workload, learned: Mapping[tuple[str, str], Learned]
) -> tuple[list[tuple[int, float]], float]:
    """Predict (batch, step seconds) points of a GPU from the model's measurements on other GPUs.

    Return the points and the standard deviation of log(measured / predicted).

    ``profile``: name of the model in the keys of ``learned``. ``label``: node label of the GPU for which to predict.
    Return no points and the deviation 0 if this GPU is not in the catalogue, or if the model was measured on no other
    GPU in the catalogue.
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
    bandwidth_Bps = slowed(device).memory_bandwidth_Bps
    return Sheet(arithmetic_FLOPs(workload, device), bandwidth_Bps, catalogue.vendor(device.name))


def _thinned(points: tuple[LearnedPoint, ...]) -> list[LearnedPoint]:
    """Return at most ``MAX_BATCHES`` evenly spaced points, including the first and the last."""
    if len(points) <= MAX_BATCHES:
        return list(points)
    last = len(points) - 1
    return [points[round(i * last / (MAX_BATCHES - 1))] for i in range(MAX_BATCHES)]
