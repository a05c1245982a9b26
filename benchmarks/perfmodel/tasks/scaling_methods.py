"""Predict step times on many devices with dljob and with baselines, from the one-device curve and measured probes.

Every method sees a ``Task``: the one-device curve, all keys, and the values of the probes only.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from benchmarks.perfmodel.formats.pollux_data import Key, Measured
from benchmarks.perfmodel.scoring.scoring import Floats
from scipy.optimize import least_squares

from dljob.calibrate import Posterior, Predicted, fit, next_probe
from dljob.calibrate.prior import Prior
from dljob.perf.fit.scaling import Runs


@dataclass(frozen=True)
class Task:
    """Inputs of a model for one workload."""

    one: dict[int, Measured]
    keys: tuple[Key, ...]

    @cached_property
    def reference_s(self) -> float:
        return float(np.exp(np.mean([np.log(m.step_s) for m in self.one.values()])))

    def one_s(self, batches: list[int]) -> Floats:
        """Return one-device times: linear between measured batch sizes, proportional beyond the largest."""
        measured = sorted(self.one)
        inside = np.interp(batches, measured, [self.one[b].step_s for b in measured])
        return np.asarray(inside * np.maximum(1.0, np.array(batches) / measured[-1]))

    def runs(self, keys: tuple[Key, ...]) -> Runs:
        columns = [(len(k.counts), max(k.counts), k.devices, k.batch) for k in keys]
        nodes, busiest, devices, batch = np.array(columns, dtype=float).reshape(-1, 4).T
        return Runs(nodes, busiest, devices, batch, self.one_s([k.batch for k in keys]))


Probes = list[tuple[Key, Measured]]
Method = Callable[[Task, Probes], Floats]
"""Returns the predicted seconds of ``task.keys``."""


def posterior(task: Task, probes: Probes, prior: Prior = Prior()) -> Posterior:  # noqa: B008 - frozen
    """Fit ``dljob.calibrate``. It uses step times alone, as all baselines except Pollux's own model do."""
    given = task.runs(tuple(key for key, _ in probes))
    return fit(task.reference_s, given, np.array([m.step_s for _, m in probes]), prior)


def ours(task: Task, probes: Probes, level: float = 0.9, prior: Prior = Prior()) -> Predicted:  # noqa: B008 - frozen
    return posterior(task, probes, prior).predict(task.runs(task.keys), level)


def chosen_probes(task: Task, measure: Callable[[Key], Measured], count: int) -> Probes:
    """Return the probes that the calibrator chooses. Each choice depends on the values of the earlier probes."""
    runs, probes, indices = task.runs(task.keys), Probes(), list[int]()
    while len(probes) < count and (at := next_probe(posterior(task, probes), runs, indices)) is not None:
        indices.append(at)
        probes.append((task.keys[at], measure(task.keys[at])))
    return probes


def picked_by_hand(task: Task, measure: Callable[[Key], Measured], count: int) -> Probes:
    """Return hand-picked probes: a full node, all nodes with one device each, all devices, two nodes, three full nodes.

    All are at the middle batch size. A missing key is replaced by the nearest one.
    """
    nodes, full = max(len(k.counts) for k in task.keys), max(k.counts[0] for k in task.keys)
    middle = sorted(task.one)[len(task.one) // 2]
    wanted = [(1, full, full), (nodes, 1, nodes), (nodes, full, nodes * full), (2, 1, 2), (3, full, 3 * full)]
    picked: list[Key] = []
    for target in wanted[:count]:
        left = [k for k in task.keys if k not in picked]
        picked.append(min(left, key=lambda k: _distance(k, (*target, middle))))
    return [(k, measure(k)) for k in picked]


def _distance(key: Key, target: tuple[int, ...]) -> float:
    place = np.array([len(key.counts), key.counts[0], key.devices, key.batch], dtype=float)
    return float(np.abs(np.log(place / np.array(target, dtype=float))).sum())


def no_communication(task: Task, probes: Probes) -> Floats:
    """Predict perfect scaling: the one-device time."""
    return task.one_s([k.batch for k in task.keys])


def affine(task: Task, probes: Probes) -> Floats:
    """Fit a + b one_s + c (devices - 1) to the one-device curve and the probes, by least squares of relative errors."""
    keys = [*(Key((1,), b) for b in task.one), *(k for k, _ in probes)]
    times = np.array([*(m.step_s for m in task.one.values()), *(m.step_s for _, m in probes)])
    columns = _affine_columns(task, tuple(keys))
    solution, *_ = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)), rcond=None)
    return np.asarray(np.maximum(_affine_columns(task, task.keys) @ solution, no_communication(task, probes) / 10))


def _affine_columns(task: Task, keys: tuple[Key, ...]) -> Floats:
    runs = task.runs(keys)
    return np.stack([np.ones(len(runs)), runs.one_s, runs.devices - 1], axis=1)


def simple(task: Task, probes: Probes) -> Floats:
    """Fit alpha-beta models of a ring between and within nodes, a contention term and a soft maximum.

    The fit is robust and in logarithms. A weak ridge penalty keeps parameters that the probes do not determine near
    their initial values.
    """
    scale, start = task.reference_s, np.array([-3.0, -0.5, -2.0, 0.05, 0.0])
    given, everything = task.runs(tuple(k for k, _ in probes)), task.runs(task.keys)
    log_s = np.log([m.step_s for _, m in probes])

    def log_step(p: Floats, runs: Runs) -> Floats:
        alpha, beta, near, contention, overlap = p
        ring = 2 * (runs.devices - 1) / runs.devices
        far_s = scale * (np.exp(alpha) * (runs.devices - 1) + np.exp(beta) * ring)
        sum_s = np.where(runs.nodes > 1, far_s, scale * np.exp(near) * ring)
        gamma, compute = 1 + np.exp(overlap), np.log(runs.one_s) + contention * np.log(runs.busiest)
        return np.asarray(np.logaddexp(gamma * compute, gamma * np.log(np.maximum(sum_s, 1e-12))) / gamma)

    def residuals(p: Floats) -> Floats:
        return np.concatenate([(log_step(p, given) - log_s) / 0.1, (p - start) / 2])

    found = least_squares(residuals, start, loss="soft_l1")
    return np.asarray(np.exp(log_step(found.x, everything)))


def has_adaptdl() -> bool:
    return importlib.util.find_spec("adaptdl") is not None


def pollux(task: Task, probes: Probes) -> Floats:
    """Fit Pollux's own model with the ``adaptdl`` package, from step times with and without waiting.

    A measurement without a recorded waiting time counts as one without waiting.
    """
    from adaptdl.goodput import GoodputFunction, fit_perf_params

    everything = [*((Key((1,), b), m) for b, m in task.one.items()), *probes]
    nodes, devices, batch = zip(*((len(k.counts), k.devices, k.batch) for k, _ in everything), strict=True)
    step_s = np.array([m.step_s for _, m in everything])
    sync_s = np.nan_to_num(np.array([m.sync_s for _, m in everything]))
    alone_s = np.where(np.array(devices) > 1, np.maximum(step_s - sync_s, step_s / 100), step_s)
    fitted = fit_perf_params(nodes, devices, np.array(batch, dtype=float), alone_s, step_s)
    model = GoodputFunction(fitted, (1.0, 1.0), 1)
    to_predict = [(len(k.counts), k.devices, k.batch) for k in task.keys]
    n, r, b = (np.array(column) for column in zip(*to_predict, strict=True))
    return np.asarray(r * b / model.throughput(n, r, b, 0))
