"""Task: let the planner choose the placement. Probes become a DLProfile, and each placement a fixed plan.

The baseline is the same planner without measured steps on several devices, which takes the network from data sheets.
Only placements that the planner can produce are compared: the same number of devices on every node.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from benchmarks.perfmodel.formats.pollux_data import Key, Measurements
from benchmarks.perfmodel.scoring.scoring import Floats, ape, mean, over_workloads, regret
from benchmarks.perfmodel.scoring.table import Cell, Options, Table
from benchmarks.perfmodel.tasks.decisions import candidates
from benchmarks.perfmodel.tasks.scaling_methods import Probes, Task, chosen_probes
from numpy.typing import NDArray

from dljob.api import ComputePoint, DLProfileStatus, ScalingPoint
from dljob.calibrate import Learned
from dljob.cluster import ClusterView, Node
from dljob.job.profiles import learned
from dljob.planner import Decision, FixedChoice, Request, plan

DEVICE = "Tesla-T4"
PARAMETERS = {"cifar10": 11.2e6, "imagenet": 25.6e6, "bert": 110e6, "yolov3": 62e6}
"""Parameters of ResNet-18, ResNet-50, BERT-base and YOLOv3; other workloads use ``DEFAULT_PARAMETERS``. Only the
data-sheet network model needs them, and nothing else depends on a workload's name."""
DEFAULT_PARAMETERS = 25e6
SHEETS = ("data-sheet network, median", "data-sheet network, p90")
STEPS = ("measured steps, median", "measured steps, p90 (the planner's choice)")
NEIGHBOURS = "neighbouring batches of each placement (noise of the data)"
"""Predictions that know all measurements but the one that they predict. For the smallest and the largest batch of a
placement, they know that too: errors leave out these two, but the regret includes them, and is lower for it. The regret
is due to the noise of single measurements, one of which is the best of each decision by luck."""
SHOWN = 5
"""Number of worst decisions in the note of the table."""


@dataclass(frozen=True)
class Priced:
    """Predicted seconds of a step, by key."""

    median_s: Floats
    p90_s: Floats


def even(key: Key) -> bool:
    """Return True if the planner can produce this placement."""
    return len(set(key.counts)) == 1


def priced(workload: Measurements, keys: list[Key], probes: Probes, *, measured: bool, device: str = DEVICE) -> Priced:
    """Predict the step times of ``keys`` after the probes. If ``measured``, the profile contains the probed steps."""
    status = DLProfileStatus(
        compute=tuple(ComputePoint(batch=b, seconds=m.step_s, observations=50) for b, m in workload.one.items()),
        scaling=tuple(
            ScalingPoint(
                nodes=len(k.counts),
                node_devices=k.counts[0],
                devices=k.devices,
                collective="Torch",
                batch=k.batch,
                seconds=m.step_s,
            )
            for k, m in probes[-64:]
            if measured and even(k)
        ),
    )
    known = {(workload.name, device): learned(status)}
    pairs = [_step(workload.name, device, key, known) for key in keys]
    return Priced(np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs]))


def _step(name: str, device: str, key: Key, known: Mapping[tuple[str, str], Learned]) -> tuple[float, float]:
    nodes, each = len(key.counts), key.counts[0]
    view = ClusterView(tuple(Node(f"n{i}", device, each, each, 64, 64.0, 2**40, is_gpu=True) for i in range(nodes)))
    request = Request(
        job="placement",
        global_batch=key.devices * key.batch,
        total_steps=1,
        profile=name,
        parameters=int(PARAMETERS.get(name, DEFAULT_PARAMETERS)),
        flops_per_sample=1e9,
        activation_nbytes_per_sample=0,
        fixed=(FixedChoice(device, nodes, each),),
    )
    found = plan(request, view, known)
    assert isinstance(found, Decision), found
    return found.chosen.prediction.step_s, found.chosen.prediction.step_p90_s


def _batches(workload: Measurements) -> dict[tuple[int, ...], list[int]]:
    """Return the measured batches of each placement in rising order."""
    batches: dict[tuple[int, ...], list[int]] = {}
    for key in sorted(workload.multi):
        batches.setdefault(key.counts, []).append(key.batch)
    return batches


def has_neighbours(workload: Measurements, keys: list[Key]) -> NDArray[np.bool_]:
    """Return for each key True if the same placement was measured with a smaller and with a larger batch."""
    batches = _batches(workload)
    return np.array([batches[key.counts][0] < key.batch < batches[key.counts][-1] for key in keys])


def between_neighbours(workload: Measurements, keys: list[Key]) -> Floats:
    """Predict each step time from the same placement's next smaller and next larger batch, linearly in logarithms.

    The smallest and the largest batch of a placement have their own measured time (``has_neighbours`` is False).
    """
    batches = _batches(workload)
    found = []
    for key in keys:
        same = batches[key.counts]
        at = same.index(key.batch)
        ends = [key.batch] if at in (0, len(same) - 1) else [same[at - 1], same[at + 1]]
        times = [workload.multi[Key(key.counts, batch)].step_s for batch in ends]
        found.append(np.exp(np.interp(np.log(key.batch), np.log(ends), np.log(times))))
    return np.array(found)


def _worst(cases: list[tuple[float, str, Key, Key]]) -> str:
    """Return a text with the worst decisions: regret in per cent, workload, chosen and best placement."""

    def text(key: Key) -> str:
        return f"{len(key.counts)} x {key.counts[0]} devices with {key.batch} samples"

    worst = sorted(cases, key=lambda case: -case[0])[:SHOWN]
    return "worst: " + "; ".join(f"{r:.0f} %, {name}: {text(a)} instead of {text(b)}" for r, name, a, b in worst)


def table(workloads: list[Measurements], count: int, options: Options) -> Table:
    """Score the regret and errors of plans after ``count`` probes, among placements that the planner can produce."""
    regrets: dict[str, list[Floats]] = {}
    errors: dict[str, list[Floats]] = {}
    cases: list[tuple[float, str, Key, Key]] = []
    for workload in workloads:
        keys = [key for key in workload.multi if even(key)]
        probes = chosen_probes(Task(workload.one, tuple(keys)), workload.multi.__getitem__, count)
        hidden = np.array([key not in {k for k, _ in probes} for key in keys])
        measured_s = np.array([workload.multi[key].step_s for key in keys])
        found = candidates(tuple(keys))
        sheets, steps = (priced(workload, keys, probes, measured=measured) for measured in (False, True))
        neighbours_s, between = between_neighbours(workload, keys), hidden & has_neighbours(workload, keys)
        for name, predicted_s, median_s, scored in (
            (SHEETS[0], sheets.median_s, sheets.median_s, hidden),
            (SHEETS[1], sheets.p90_s, sheets.median_s, hidden),
            (STEPS[0], steps.median_s, steps.median_s, hidden),
            (STEPS[1], steps.p90_s, steps.median_s, hidden),
            (NEIGHBOURS, neighbours_s, neighbours_s, between),
        ):
            chosen = regret(measured_s / found.samples, predicted_s / found.samples, list(found.groups))
            regrets.setdefault(name, []).append(chosen)
            errors.setdefault(name, []).append(ape(measured_s, median_s)[scored])
        lost = regrets[STEPS[1]][-1]
        for percent, group in zip(lost, found.groups, strict=True):
            predicted, true = ((times / found.samples)[group] for times in (steps.p90_s, measured_s))
            chosen_key, best = (keys[group[int(np.argmin(each))]] for each in (predicted, true))
            cases.append((float(percent), workload.name, chosen_key, best))
    rows: list[tuple[Cell, ...]] = []
    for name, each in regrets.items():
        worst = max(float(x.max()) for x in each)
        of_plans = over_workloads(each, mean, options.resamples)
        scored_errors = [errors_of for errors_of in errors[name] if len(errors_of) or name != NEIGHBOURS]
        of_steps = over_workloads(scored_errors, mean, options.resamples) if scored_errors else None
        rows.append((name, sum(map(len, each)), of_plans, worst, of_steps))
    title = f"{count} probes: plans of the planner, slower than the best placement of the same global batch, %"
    return Table(title, ("planned by", "decisions", "mean", "worst", "mean step error"), tuple(rows), _worst(cases))
