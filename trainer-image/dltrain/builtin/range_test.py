"""A learning-rate range test: train with many learning rates, and analyze the curve of the loss or of the accuracy.

The test (Smith 2015) trains with an exponentially growing learning rate. The loss falls while rates are useful, and
rises when they are too large. The accuracy of a classifier rises and falls instead, and is bounded. The state of model
and optimizer before the test is then restored, so that the test does not affect the training.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp, isfinite, log
from typing import Any

import numpy as np
from torch import Tensor, nn

from dltrain.batch.micro_batches import MicroBatches
from dltrain.checkpoint.job_files import JobFiles
from dltrain.data.feeding.loader import Loader
from dltrain.data.feeding.source import Request
from dltrain.device import randomness
from dltrain.train.trainer import Trainer

LossOf = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Type of a function (model, batch) → (mean loss, fraction of correct predictions)."""
LOW, HIGH, STEPS = 1e-6, 10.0, 100
DIVERGED_RATIO = 4.0
"""Ratio of the loss to the first loss above which the test ends, because the training diverges."""
MIN_RELATIVE_DECREASE = 0.02
"""Minimum decrease of the loss during the test, as a fraction of its initial value.

With a smaller decrease, the test finds no learning rate.
"""
LIMIT_S = 1800.0
JSON, PLOT = "learning-rate.json", "learning-rate.svg"
DEGREE = 7


@dataclass(frozen=True)
class RateInterval:
    """The learning rates at which the loss starts and stops decreasing.

    ``rate``: the geometric mean of ``low`` and ``high``, which is the rate to use.
    """

    low: float
    high: float
    rate: float


def interval(rates: Sequence[float], losses: Sequence[float]) -> RateInterval | None:
    """Return the useful interval of learning rates, or None if the loss never falls enough.

    A polynomial of degree 7 in ln(rate) is fitted to the losses. It gives a first interval, in which the loss falls at
    least a quarter as fast as at the steepest point. In this interval, the line loss = a + b ln(rate) is fitted. The
    rates at which the line reaches the initial and the minimum loss bound a second interval. The result is the
    intersection of the two intervals, or the first interval if the intersection is empty.
    """
    if len(rates) < 2 * DEGREE:
        return None
    x, y = np.log(np.array(rates)), np.array(losses)
    start = float(np.median(y[: max(3, len(y) // 10)]))
    bottom = int(np.argmin(y))
    above = np.flatnonzero(y[bottom:] > start)
    end = bottom + int(above[0]) if len(above) else len(y)  # the diverging part must not affect the fit
    x, y = x[:end], y[:end]
    if end < 2 * DEGREE:
        return None
    curve = np.polynomial.Chebyshev.fit(x, y, DEGREE)
    grid = np.linspace(x[0], x[-1], 1000)[50:-10]  # polynomials swing at their ends
    least = int(np.argmin(curve(grid)))
    slope = curve.deriv()(grid[: least + 1])
    steepest = int(np.argmin(slope))
    if start - float(curve(grid[least])) < MIN_RELATIVE_DECREASE * start or slope[steepest] >= 0:
        return None
    flat = slope > slope[steepest] / 4
    before, after = np.flatnonzero(flat[:steepest]), np.flatnonzero(flat[steepest:])
    low, high = grid[before[-1] if len(before) else 0], grid[steepest + after[0] if len(after) else least]
    inside = (x >= low) & (x <= high)
    if inside.sum() >= 3:
        b, a = np.polyfit(x[inside], y[inside], 1)
        if b < 0:
            meets_start, meets_least = (start - a) / b, (float(curve(grid[least])) - a) / b
            if max(low, meets_start) < min(high, meets_least):
                low, high = max(low, meets_start), min(high, meets_least)
    return RateInterval(exp(low), exp(high), exp((low + high) / 2))


def accuracy_interval(rates: Sequence[float], accuracies: Sequence[float]) -> RateInterval | None:
    """Return the useful interval of learning rates by the curve of the accuracy, or None if it never rises enough.

    ``accuracies``: fraction of correct predictions in the global batch at each rate, from 0 to 1. The polynomial of
    degree 7 and the logarithmic fit are those of ``interval``, applied to the fraction of wrong predictions.
    """
    return interval(rates, [1 - accuracy for accuracy in accuracies])


@dataclass(frozen=True)
class Curves:
    """The learning rates of a range test, and the mean loss and accuracy of the global batch at each of them."""

    rates: list[float]
    losses: list[float]
    accuracies: list[float]

    def interval(self, curve: str) -> RateInterval | None:
        """Return the useful interval of learning rates, read from the curve of the ``Loss`` or of the ``Accuracy``."""
        if curve == "Accuracy":
            return accuracy_interval(self.rates, self.accuracies)
        return interval(self.rates, self.losses)


def ramp(trainer: Trainer, loader: Loader, loss_of: LossOf) -> Curves:
    """Train with growing learning rates. Return the curves of loss and accuracy.

    The rates grow exponentially from ``LOW`` to ``HIGH`` in ``STEPS`` steps. The test ends earlier if the loss
    diverges. Afterwards, the states of model and optimizer are restored. ``loss_of``: function that returns the loss
    and the accuracy of (model, batch). The result is equal on all ranks. Raise PeerLostError if a rank is lost.
    """
    model, optimizer, parallel = trainer.model, trainer.optimizer, trainer.parallel
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    sampler = loader.sampler(trainer.plan)
    found, micro_batches = Curves([], [], []), MicroBatches(trainer.plan)
    try:
        for step in range(STEPS):
            rate = LOW * (HIGH / LOW) ** (step / (STEPS - 1))
            part = sampler.part(step, trainer.shares, trainer.rank)
            randomness.seed(randomness.of_step(trainer.plan.seed, step, trainer.rank), trainer.device)
            parts = micro_batches.of_step(part, trainer.shares) if len(part.indices) else []
            parallel.begin(part.weight, [0.0] * parallel.tail_length, accumulates=len(parts) > 1)
            logged: Tensor | float = 0.0
            correct: Tensor | float = 0.0
            for number, small in enumerate(parts):
                if len(parts) > 1:
                    parallel.begin_micro_batch(small.weight, last=number == len(parts) - 1)
                request = Request.of(small, trainer.plan.seed)
                assert request is not None, "each micro-batch has a sample"
                loss, accuracy = loss_of(model, loader.fetch(request))
                logged = logged + loss.detach() * small.weight
                correct = correct + accuracy * small.weight
                parallel.share(0, (logged, part.weight, correct))
                loss.backward()  # type: ignore[no-untyped-call]
            total, weight, right = parallel.finish()[:3]
            if not isfinite(total) or (found.losses and total / weight > DIVERGED_RATIO * found.losses[0]):
                break
            found.rates.append(rate)
            found.losses.append(total / weight)
            found.accuracies.append(right / weight)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            parallel.spread()
    finally:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    return found


def find_rate(trainer: Trainer, loader: Loader, loss_of: LossOf) -> float:
    """Return the learning rate that an earlier attempt of this job found, or else find it with a range test.

    An attempt is a launch of the job's ranks. All ranks must call this function together, and get the same rate. If the
    loss never falls enough in the test, or the accuracy never rises enough if the plan asks for its curve, return the
    learning rate of the plan. If checkpoints are enabled, rank 0 writes both curves as JSON and as a plot beside the
    job's checkpoints. ``loss_of``: function that returns the loss and the accuracy of (model, batch).
    """
    plan = trainer.plan
    files = JobFiles(plan) if trainer.rank == 0 and plan.checkpoint.enabled else None
    saved = saved_rate(lambda: files.read(JSON)) if files is not None else None
    if encoded := trainer.process_group.broadcast(b"" if saved is None else repr(saved).encode()):
        return float(encoded)
    trainer.busy("learning rate range test", LIMIT_S)
    curves = ramp(trainer, loader, loss_of)
    found = curves.interval(plan.optimizer.rate_curve)
    rate = found.rate if found else plan.optimizer.learning_rate
    if files is not None:
        curve = {
            "rate": rate,
            "curve": plan.optimizer.rate_curve,
            "found": asdict(found) if found else None,
            **asdict(curves),
        }
        files.write(PLOT, plot(curves.rates, curves.losses, found, curves.accuracies).encode())
        files.write(JSON, json.dumps(curve, indent=1).encode())
    return rate


def saved_rate(read: Callable[[], bytes]) -> float | None:
    """Return the learning rate in the file of an earlier test, or None if the file is missing or damaged.

    ``read``: returns the file's content. Raise its OSError if the file exists but cannot be read.
    """
    try:
        rate = float(json.loads(read())["rate"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return rate if isfinite(rate) and rate > 0 else None


def plot(
    rates: Sequence[float], losses: Sequence[float], found: RateInterval | None, accuracies: Sequence[float] = ()
) -> str:
    """Return a plot of the losses over the learning rates (logarithmic axis) as SVG. ``found``: interval to shade.

    ``accuracies``: fractions of 1 for a second, dashed line, whose axis ends at 1; empty for none.
    """
    width, height, margin = 640, 360, 48
    top = min(max(losses, default=1.0), 1.5 * losses[0] if losses else 1.0) or 1.0

    def at_x(rate: float) -> float:
        return margin + (width - 2 * margin) * log(rate / LOW) / log(HIGH / LOW)

    def at_y(loss: float) -> float:
        return height - margin - (height - 2 * margin) * min(loss, top) / top

    points = " ".join(f"{at_x(r):.1f},{at_y(v):.1f}" for r, v in zip(rates, losses, strict=True))
    dashed = ""
    if accuracies:
        at = " ".join(
            f"{at_x(r):.1f},{height - margin - (height - 2 * margin) * a:.1f}"
            for r, a in zip(rates, accuracies, strict=True)
        )
        dashed = (
            f'<polyline points="{at}" fill="none" stroke="#2a7" stroke-width="1.5" stroke-dasharray="5 3"/>'
            f'<text x="{width - margin + 6}" y="{margin}">1</text>'
        )
    decades = [10.0**e for e in range(round(log(LOW, 10)), round(log(HIGH, 10)) + 1)]
    ticks = "".join(f'<text x="{at_x(d):.0f}" y="{height - 28}" text-anchor="middle">{d:g}</text>' for d in decades)
    shade = ""
    if found:
        left, right, middle = at_x(found.low), at_x(found.high), at_x(found.rate)
        shade = (
            f'<rect x="{left:.1f}" y="{margin}" width="{right - left:.1f}" height="{height - 2 * margin}" fill="#cde"/>'
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{margin}" y2="{height - margin}" stroke="#48c"/>'
        )
    dashes = "; dashed: accuracy, from 0 to 1" if accuracies else ""
    title = (
        f"learning rate {found.rate:.3g}, from {found.low:.3g} to {found.high:.3g}"
        if found
        else "found no useful learning rate"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12">{shade}<polyline points="{points}" fill="none" stroke="#222" stroke-width="1.5"/>{dashed}'
        f'<text x="{margin}" y="24">{title}</text><text x="4" y="{margin}">{top:.3g}</text>'
        f'<text x="4" y="{height - margin}">0</text>{ticks}'
        f'<text x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">learning rate (loss upwards{dashes})'
        "</text></svg>\n"
    )
