"""Say in words what the curves of a run show: over-fitting, noise, a wrong learning rate, data errors. No I/O.

The curves are those of the run report. The thresholds are rules of thumb, chosen so that the named curves in
``tests/trainer/record/test_learning_curves.py`` and the runs in ``docs/how-to/results.md`` get the right findings. Each
finding names its numbers, so that a reader can disagree.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, median

from dlcontract import RunPhase, reasons
from dltrain.analysis.result import Analysis
from dltrain.record.run_report.document import Document, Finding

Values = Sequence[tuple[int, float]]
"""Pairs (step, value), in the order of the steps."""

MIN_POINTS = 8
"""Minimum number of points of a loss curve that shows anything."""
PARTS = 20
"""Maximum number of equal parts into which the steps are divided. The mean of a part shows the trend without noise."""
CONSTANT = 1e-3
"""A loss is constant if it stays within this fraction of its mean."""
LEARNS = 0.03
"""A loss decreases if the lowest part of its trend is below the first one by more than this fraction."""
SLOW = 0.1
"""A training is too slow or too short if its loss decreased by at most this part."""
EXPLODED = 0.5
"""A loss explodes if a value exceeds the first one by more than this part of it."""
FELL_BEFORE = 0.85
"""A loss fell and rose again if its lowest value is below this part of its last value, and not because of noise."""
ROSE = 0.3
"""A loss has risen again if it gave back this part of its decrease."""
NOISY = 0.2
"""A loss is noisy if its standard deviation around the trend exceeds this part of its decrease and of its last value.
"""
STILL_FALLING = 0.1
"""A run ended too early if the loss fell by more than this part in the last fifth of the steps."""
NEGLIGIBLE = 0.02
"""A loss below this part of its first value is low enough not to be asked for more steps."""
GAP = 2.0
"""A model over-fits if the held-out loss exceeds the training loss by this factor, and by ``GAP_NATS``."""
GAP_NATS = 0.2
WORSE_ACCURACY = 0.02
"""Minimum loss of held-out accuracy since its best value that counts, if it also exceeds two standard errors."""
WORSE_PERPLEXITY = 0.01
"""A language model is worse than another one if its perplexity exceeds that of the other by this part."""
MISCALIBRATED = 0.1
MIN_SUPPORT = 5
"""Minimum number of held-out samples of a class for a finding about this class."""
NOISE_RATIO = 4.0
"""A batch is small if the gradient noise scale exceeds it by this factor."""
CLEAR = 4.0
"""A difference of two means is clear if it exceeds this number of standard errors of one of them."""
RISING_LOSSES = re.compile(
    r"(^|[^a-z])(rewards?|returns?|episodes?|policy|actor|critic|generator|discriminator|[gd]_?loss|loss_?[gd])([^a-z]|$)",
    re.IGNORECASE,
)
"""Names of metrics of reinforcement learning and of adversarial networks, whose losses need not fall."""
HELD_OUT_LOSSES = ("val_loss", "valid_loss", "validation_loss", "eval_loss", "test_loss", "held_out_loss")
"""Names of metrics that are losses on held-out data."""


def diagnose(document: Document) -> tuple[Finding, ...]:
    """Return the findings about a run, the most important one first; none if its curves show no problem."""
    loss = [(point.step, point.loss) for point in document.points if point.loss is not None]
    analysis = document.analysis.analysis if document.analysis is not None else None
    ended = document.phase is RunPhase.SUCCEEDED
    found = [
        *_of_faults(document),
        *of_loss(
            loss,
            document.global_batch,
            _noise_samples(document),
            ended=ended and not _stopped_early(document),
            may_rise=_may_rise(document),
        ),
        *(of_analysis(analysis) if analysis is not None else ()),
    ]
    names = {each.name for each in found}
    if not names & {"ConstantLoss", "NotLearning", "LearningRateTooHigh", "NoBetterThanBaseline"}:
        found += _of_held_out(document, loss, analysis)
    if "NotConverged" in names:  # Its consequence.
        found = [each for each in found if each.name != "Underconfident"]
    order = list(Finding.ORDER)
    return tuple(
        sorted({each.name: each for each in reversed(found)}.values(), key=lambda each: order.index(each.name))
    )


def of_loss(
    loss: Values, batch: int = 0, noise_samples: float | None = None, *, ended: bool, may_rise: bool = False
) -> Iterator[Finding]:
    """Yield the findings about a training loss.

    ``batch``: global batch size, in samples. ``noise_samples``: gradient noise scale; None: unknown. ``ended``: True if
    the training made all its steps. ``may_rise``: True if the loss need not fall for the model to improve. A loss whose
    sign changes counts as falling or rising only if the difference is clear, since no part of it means anything.
    """
    values = [value for _, value in loss]
    if len(loss) < MIN_POINTS:
        if ended and len(loss) > 1 and 0 < values[0] * (1 - SLOW) < values[-1] < values[0]:
            yield _slow(loss[-1][0], values[0], values[-1])
        return
    level = abs(fmean(values))
    if max(values) - min(values) <= CONSTANT * max(level, 1e-12):
        yield Finding(
            name="ConstantLoss",
            message=f"The training loss stays at {values[-1]:.4g}. Check that the optimizer has the model's "
            "parameters, that the learning rate is not 0, and that inputs and targets are not constant",
        )
        return
    trend = _trend(loss)
    start, lowest, last = min(values[:3]), min(trend), trend[-1]
    noise, fell = _noise(values), start - lowest
    error = noise / sqrt(max(1, len(loss) // len(trend)))  # of the mean of a part
    if min(values) < 0 < max(values) and fell <= max(LEARNS * abs(start), CLEAR * error):
        return
    if fell <= LEARNS * abs(start):
        if not may_rise:
            yield _never_falls(values, start, last, noise)
        return
    at = trend.index(lowest)
    if last > lowest + max(ROSE * fell, CLEAR * error) and at < 0.8 * len(trend):
        if may_rise:
            return
        yield Finding(
            name="LearningRateTooHigh",
            message=f"The training loss fell to {lowest:.4g} and then rose to {last:.4g}. Try a lower learning rate, a "
            "longer warm-up, or clip the gradient",
        )
        return
    if fell <= SLOW * abs(start):
        if ended:
            yield _slow(loss[-1][0], start, last)
        return
    if noise > NOISY * fell and noise > NOISY * abs(last):
        yield Finding(name="NoisyLoss", message=_noisy(noise, last, batch, noise_samples))
    before = trend[-1 - max(1, len(trend) // 5)]
    falls = before - last > max(STILL_FALLING * abs(before), 2 * error) and last > NEGLIGIBLE * abs(start)
    if ended and falls:
        yield Finding(
            name="NotConverged",
            message=f"The training loss still fell from {before:.4g} to {last:.4g} in the last fifth of the steps. "
            "Train for more epochs, or with a higher learning rate",
        )


def _never_falls(values: Sequence[float], start: float, last: float, noise: float) -> Finding:
    """Return the finding about a loss whose trend is never clearly below its first value ``start``.

    ``last``: its last value. ``noise``: its standard deviation around the trend.
    """
    high, low = max(values), min(values)
    rose_again = last - low > max((1 - FELL_BEFORE) * abs(last), 4 * noise)
    if noise > NOISY * abs(start) or high > start + EXPLODED * abs(start) or rose_again:
        return Finding(
            name="LearningRateTooHigh",
            message=f"The training loss began at {start:.4g}, was {low:.4g} to {high:.4g}, and ended at {last:.4g}. "
            "If it should fall, as most losses do, try a learning rate ten times lower",
        )
    return Finding(
        name="NotLearning",
        message=f"The training loss began at {start:.4g} and ended at {last:.4g}. Check that inputs and targets belong "
        "together and that inputs are scaled. Then try learning rates ten times lower and ten times higher",
    )


def _slow(step: int, start: float, last: float) -> Finding:
    return Finding(
        name="NotConverged",
        message=f"The training loss fell only from {start:.4g} to {last:.4g} in {step} steps. Train for more epochs, "
        "or with a higher learning rate. If that changes nothing, the inputs say little about the targets",
    )


def of_analysis(analysis: Analysis) -> Iterator[Finding]:
    """Yield the findings about the predictions for held-out data."""
    if analysis.invalid:
        yield Finding(
            name="InvalidPredictions",
            message=f"{analysis.invalid} of {analysis.samples + analysis.invalid} predictions are NaN or infinite. "
            "Check the inputs of these samples, and lower the learning rate",
        )
    if (text := _no_better(analysis)) is not None:
        yield Finding(
            name="NoBetterThanBaseline",
            message=f"{text}. Check that inputs and targets belong together, and that inputs are scaled as in the "
            "training",
        )
    elif analysis.classification is not None:
        missed = [each for each in analysis.classification.figures if each.support >= MIN_SUPPORT and not each.correct]
        if missed:
            names = ", ".join(each.name for each in missed[:3]) + (" and others" if len(missed) > 3 else "")
            yield Finding(
                name="MissedClass",
                message=f"No sample of class {names} is recognized ({sum(each.support for each in missed)} held-out "
                "samples). If the class is rare, weight its loss or repeat its samples",
            )
    if (text := _worse_than_other(analysis)) is not None:
        how = " (in projects of dljob suggest: python baseline.py --predict)" if analysis.language is None else ""
        yield Finding(
            name="WorseThanOtherModel",
            message=f"{text}. Use that model{how}. Or change this one: weight decay or a smaller model if it "
            "over-fits; otherwise more epochs, another learning rate or a larger model",
        )
    calibration = analysis.calibration
    if calibration is not None and calibration.error > max(MISCALIBRATED, 1 / sqrt(max(1, analysis.samples))):
        over = calibration.bias > 0
        yield Finding(
            name="Overconfident" if over else "Underconfident",
            message=f"The model is too {'sure' if over else 'unsure'}: confidence and accuracy differ by "
            f"{100 * calibration.error:.0f} percentage points on average. Do not read its scores as probabilities, or "
            "fit a temperature on held-out data",
        )


def _of_faults(document: Document) -> Iterator[Finding]:
    if count := document.totals.faults.get(reasons.DIVERGED):
        yield Finding(
            name="LearningRateTooHigh",
            message=f"The loss became NaN or infinite {count} time{'s' if count > 1 else ''}. Lower the learning rate, "
            "clip the gradient, or look for such values in the data",
        )


def _of_held_out(document: Document, loss: Values, analysis: Analysis | None) -> Iterator[Finding]:
    """Yield a finding if the model over-fits: it improves on the training data and gets worse on held-out data."""
    remedy = "Stop earlier (spec.until), use more data or augmentation, weight decay or a smaller model"
    for name in HELD_OUT_LOSSES:
        held_out = [(entry.step, entry.values[name]) for entry in document.metrics if name in entry.values]
        if len(held_out) < 3:
            continue
        step, best = min(held_out, key=lambda entry: (entry[1], entry[0]))
        if held_out[-1][1] > best + max(0.05 * abs(best), 2 * _noise([value for _, value in held_out])):
            yield Finding(
                name="Overfitting",
                message=f"{name} was lowest at step {step} ({best:.4g}) and rose to {held_out[-1][1]:.4g}. {remedy}",
            )
            return
    accuracies = [(entry.step, entry.accuracy) for entry in document.evaluations]
    if len(accuracies) >= 3 and len(loss) >= MIN_POINTS and _trend(loss)[-1] < median(v for _, v in loss):
        step, best = max(accuracies, key=lambda entry: (entry[1], -entry[0]))
        last = accuracies[-1][1]
        error = sqrt(best * (1 - best) / analysis.samples) if analysis is not None and analysis.samples else 0.0
        if best - last > max(WORSE_ACCURACY, 2 * error):
            yield Finding(
                name="Overfitting",
                message=f"The held-out accuracy was best at step {step} ({best:.4g}) and fell to {last:.4g}, while the "
                f"training loss went on falling. {remedy}",
            )
            return
    classes = analysis.classification if analysis is not None else None
    if classes is None or classes.log_loss is None or len(loss) < MIN_POINTS:
        return
    train = _trend(loss)[-1]
    if train >= 0 and classes.log_loss > GAP * train and classes.log_loss - train > GAP_NATS:
        yield Finding(
            name="Overfitting",
            message=f"The loss is {train:.4g} on training data and {classes.log_loss:.4g} on held-out data. {remedy}",
        )


def _no_better(analysis: Analysis) -> str | None:
    """Return a text if the model predicts no better than one that ignores its inputs; otherwise None."""
    (name, value), baseline = analysis.metric, analysis.baseline
    if baseline is None or analysis.samples < MIN_POINTS:
        return None
    if analysis.classification is not None:
        margin = sqrt(max(baseline * (1 - baseline), 1e-6) / analysis.samples)
        poor, baseline_text = value <= baseline + margin, "always predicting the most frequent class"
    elif analysis.regression is not None:
        poor, baseline_text = value <= 0.02, "always predicting the mean"
    else:
        poor, baseline_text = value >= 0.95 * baseline, "guessing"
    if not poor:
        return None
    return f"The held-out {name} is {value:.4g}, no better than {baseline_text} ({baseline:.4g})"


def _worse_than_other(analysis: Analysis) -> str | None:
    """Return a text if another model is better by more than the standard error of its metric; otherwise None.

    The standard error of an R² is about 2 R (1 - R²) / √n (Cohen et al. 2003, "Applied multiple regression", 3.6).
    """
    other = analysis.best_other
    if other is None or analysis.samples < MIN_POINTS:
        return None
    name, value = analysis.metric
    if analysis.language is not None:
        worse = value > other.value * (1 + WORSE_PERPLEXITY)
    else:
        best = min(max(other.value, 0.0), 1.0)
        error = sqrt(best * (1 - best)) if analysis.classification is not None else 2 * sqrt(best) * (1 - best)
        worse = other.value > value + max(error / sqrt(analysis.samples), 1e-9)
    if not worse:
        return None
    return f"The held-out {name} is {value:.4g}, worse than that of another model ({other.name}: {other.value:.4g})"


def _noisy(noise: float, last: float, batch: int, noise_samples: float | None) -> str:
    text = f"The training loss varies by ±{noise:.2g} around {last:.4g}"
    if noise_samples is not None and batch and noise_samples > NOISE_RATIO * batch:
        return (
            f"{text}. The gradient noise scale is {noise_samples:.3g} samples and the batch {batch}: try a larger "
            "batch (globalBatchSize)"
        )
    return f"{text}. Try a larger batch, or a lower learning rate; check for samples with wrong targets"


def _may_rise(document: Document) -> bool:
    """Return True if the loss need not fall for the model to improve, or if the model improves while it does not.

    Names of metrics show reinforcement learning and adversarial networks. Otherwise the accuracy on held-out data
    counts: it must be better than at first, and not worse than its best value.
    """
    if any(RISING_LOSSES.search(name) for entry in document.metrics for name in entry.values):
        return True
    accuracies = [entry.accuracy for entry in document.evaluations]
    return len(accuracies) > 1 and max(accuracies) - WORSE_ACCURACY <= accuracies[-1] > accuracies[0] + WORSE_ACCURACY


def _noise_samples(document: Document) -> float | None:
    return document.points[-1].noise_samples if document.points else None


def _stopped_early(document: Document) -> bool:
    return document.outcome is not None and document.outcome.stopped is not None


def _trend(values: Values) -> list[float]:
    """Return the means of ``values`` in equal parts of the steps: at most ``PARTS``, each with some values."""
    count = min(PARTS, len(values) // 2)
    begin, end = values[0][0], values[-1][0]
    parts: list[list[float]] = [[] for _ in range(count)]
    for step, value in values:
        parts[min(count - 1, count * (step - begin) // max(1, end - begin))].append(value)
    return [fmean(part) for part in parts if part]


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation around the trend in the last half, from the median difference of neighbours.

    The median ignores single jumps. For normal noise, differences have √2 times its standard deviation, and the median
    of their absolute values is 0.6745 standard deviations.
    """
    half = values[len(values) // 2 :]
    differences = [abs(b - a) for a, b in pairwise(half)]
    return median(differences) / 0.6745 / sqrt(2) if differences else 0.0
