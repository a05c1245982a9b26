"""Format ``clocks``: time, power and energy of programs on GPUs with locked clocks (``clocks_data`` says which files).

The model sees the power at the highest clock, and predicts time, power and energy at the others, divided by those at
the highest. ``choice`` is the measured energy at the clock that the model finds best, above the least measured energy
of the program, for curves with the power of at least ``ENOUGH`` clocks. The constants of ``perf.resources.energy`` and
``power`` were fitted on ``FITTED``. All else is held out: other programs on the same devices, and whole devices.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.perfmodel.formats.clocks_data import IDLE_W, Curve, Point, load
from benchmarks.perfmodel.scoring.compare import dropped
from benchmarks.perfmodel.scoring.table import Cell, Options, Table

from dljob.cluster.catalogue import Device, gpu_or_assumed
from dljob.perf.resources.power import under_clock

FITTED = {("a100_sxm", "layer of gpt3-175b"), ("A100", "bert-huge-uncased"), ("A100", "gpt3-xl")}
"""(Device, program) of the measurements on which the constants were fitted."""
SETS = ("fitted", "other programs on the same devices", "training on other devices", "kernels on other devices")
ENOUGH = 3
"""Clocks with a measured power, besides the highest, that a curve needs to offer a choice."""
MAX_MHZ = 1000.0
"""Maximum clock of the device with which the model is asked; only the ratio of clocks matters."""

Method = Callable[[Device, float, Point], tuple[float, float]]
"""(Device, power at the highest clock, point) → predicted (time, power), divided by those at the highest clock."""


def run(directory: Path, options: Options) -> list[Table]:
    """Return one table for each of ``SETS`` that has measurements."""
    curves, complaints = load(directory)
    curves = [curve for curve in curves if options.wants(curve.device)]
    sets: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        sets[_set(curve)].append(curve)
    tables = [_table(name, sets[name]) for name in SETS if sets[name]]
    return [*tables[:-1], replace(tables[-1], note=dropped(complaints))] if tables else []


def _set(curve: Curve) -> str:
    if (curve.device, curve.program) in FITTED:
        return SETS[0]
    if curve.device in {device for device, _ in FITTED}:
        return SETS[1]
    return SETS[3] if curve.device in ("v100", "rtx8000") else SETS[2]


def model(device: Device, demand_W: float, point: Point) -> tuple[float, float]:
    found = under_clock(device, demand_W)
    return found.seconds, found.power_W / demand_W


def no_effect(device: Device, demand_W: float, point: Point) -> tuple[float, float]:
    return 1.0, 1.0


def textbook(device: Device, demand_W: float, point: Point) -> tuple[float, float]:
    """Predict that time is inversely proportional to the clock, and power above idle to its cube."""
    idle = device.idle_power_W / demand_W
    return 1 / point.clock, idle + (1 - idle) * point.clock**3


METHODS: dict[str, Method] = {"model": model, "no effect": no_effect, "1/f and f^3": textbook}


def _table(name: str, curves: list[Curve]) -> Table:
    """Return the median over programs of their median error, and the largest error of all points, in percent."""
    programs: dict[tuple[str, str], list[tuple[Device, Curve, Point]]] = defaultdict(list)
    for curve in curves:
        programs[curve.device, curve.program] += [(_device(curve, point), curve, point) for point in curve.points]
    rows: list[tuple[Cell, ...]] = []
    for quantity in ("time", "power", "energy"):
        for method, predict in METHODS.items():
            errors = [
                [abs(e) for case in cases if (e := _error(quantity, predict, *case)) is not None]
                for cases in programs.values()
            ]
            errors = [each for each in errors if each]
            if errors:
                middle, worst = median(map(median, errors)), max(map(max, errors))
                rows.append((quantity, method, len(errors), sum(map(len, errors)), 100 * middle, 100 * worst))
    for method, predict in METHODS.items():
        lost = [loss for curve in curves if (loss := _lost(predict, curve)) is not None]
        if lost:
            rows.append(("choice", method, len(lost), len(lost), 100 * median(lost), 100 * max(lost)))
    columns = ("quantity", "method", "programs", "points", "median", "worst")
    return Table(f"{name}: error relative to the highest clock, %", columns, tuple(rows))


def _device(curve: Curve, point: Point) -> Device:
    """Return a device at the clock of ``point``. Only its idle power and the ratio of clocks matter to the model."""
    fields = {"idle_power_W": IDLE_W[curve.device], "max_clock_MHz": MAX_MHZ, "clock_limit_MHz": MAX_MHZ * point.clock}
    return Device(**{**vars(gpu_or_assumed("a100")), **fields})


def _lost(predict: Method, curve: Curve) -> float | None:
    """Return the measured energy at the clock with the least predicted energy, above the least measured, as a fraction.

    Return None for a curve with the power of too few clocks.
    """
    points = [Point(1.0, 1.0, 1.0), *(point for point in curve.points if point.power is not None)]
    if len(points) <= ENOUGH:
        return None
    measured, predicted = list[float](), list[float]()
    for point in points:
        seconds, power = predict(_device(curve, point), curve.demand_W, point)
        predicted.append(seconds * power)
        measured.append(point.seconds * (point.power or 0.0))
    return measured[predicted.index(min(predicted))] / min(measured) - 1


def _error(quantity: str, predict: Method, device: Device, curve: Curve, point: Point) -> float | None:
    """Return the relative error of a prediction; None if the point lacks the quantity."""
    seconds, power = predict(device, curve.demand_W, point)
    if quantity == "time":
        return seconds / point.seconds - 1
    if point.power is None:
        return None
    return power / point.power - 1 if quantity == "power" else seconds * power / (point.seconds * point.power) - 1
