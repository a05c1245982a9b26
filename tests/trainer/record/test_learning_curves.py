"""What curves with a name are diagnosed as: each curve has one cause, and the finding names it."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcontract import Outcome, RunPhase, StoppedEarly
from dltrain.analysis.result import (
    Analysis,
    Bin,
    Calibration,
    ClassFigures,
    Classification,
    Language,
    OtherModel,
    Regression,
)
from dltrain.record.run_report.document import Document, Evaluation, Finding, HeldOutAnalysis, LoggedValues, Point
from dltrain.record.run_report.learning_curves import MIN_POINTS, diagnose

STEPS = 200
Curve = Callable[[float], float]


def document(
    loss: Curve,
    *,
    steps: int = STEPS,
    noise: float = 0.0,
    accuracy: Curve | None = None,
    held_out_loss: Curve | None = None,
    analysis: Analysis | None = None,
    phase: RunPhase = RunPhase.SUCCEEDED,
    noise_samples: float | None = None,
    stopped: bool = False,
    seed: int = 0,
    signed: bool = False,
    metrics: dict[str, Curve] | None = None,
) -> Document:
    """Return a run whose curves are functions of the part of the steps, from 0 to 1, with normal noise on the loss.

    ``signed``: True if the loss may be negative. ``metrics``: curves of other values that the script logs.
    """
    if held_out_loss is not None:
        metrics = {"val_loss": held_out_loss}
    drawn = random.Random(seed)
    points = tuple(
        Point(
            step=step, steps=1, unix_s=step, step_s=0.1,
            loss=max(-math.inf if signed else 0.0, loss(step / steps) + drawn.gauss(0, noise)),
            samples_per_s=640, world_size=1, noise_samples=noise_samples,
        )
        for step in range(1, steps + 1)
    )  # fmt: skip
    at = [steps * part // 10 for part in range(1, 11)]
    why = StoppedEarly(reason="TargetReached", message="")
    return Document(
        job="job", namespace="test", uid="u", model="mlp", dataset="digits", global_batch=64, seed=0, term=1,
        phase=phase, started_unix_s=0, updated_unix_s=1, step=steps, steps=steps, points=points,
        outcome=Outcome(steps=steps, seconds=1, stopped=why if stopped else None),
        evaluations=tuple(Evaluation(step=s, unix_s=s, accuracy=accuracy(s / steps)) for s in at if accuracy),
        metrics=tuple(LoggedValues(step=s, unix_s=s, values={name: of(s / steps) for name, of in metrics.items()})
                      for s in at if metrics),
        analysis=None if analysis is None else HeldOutAnalysis(step=steps, unix_s=1, analysis=analysis),
    )  # fmt: skip


def names(of: Document) -> list[str]:
    return [finding.name for finding in diagnose(of)]


def falling(t: float) -> float:
    """Return a loss that falls and is flat in the end, as with a decaying learning rate."""
    return 0.1 + 2.2 * math.exp(-8 * t)


def classifier(
    *, accuracy: float = 0.95, log_loss: float = 0.15, confidence: float | None = None, missed: bool = False
) -> Analysis:
    right = round(500 * accuracy)
    bins = (Bin(accuracy if confidence is None else confidence, accuracy, 1000),)
    figures = (
        ClassFigures("cat", 500, 500, right, accuracy, accuracy, accuracy),
        ClassFigures("dog", 500, 500, 0 if missed else right, accuracy, accuracy, accuracy),
    )
    return Analysis(
        "classification",
        1000,
        classification=Classification(
            classes=2, accuracy=accuracy, baseline_accuracy=0.5, balanced_accuracy=accuracy, macro_f1=accuracy,
            figures=figures, confusion=((right, 500 - right), (500 - right, right)), log_loss=log_loss,
            calibration=Calibration(abs(bins[0].confidence - accuracy), bins),
        ),
    )  # fmt: skip


def beside(analysis: Analysis, value: float) -> Analysis:
    """Return the analysis with the main metric of two other models, of which one is useless."""
    useless = 500.0 if analysis.language is not None else 0.01
    return replace(analysis, other_models=(OtherModel("trees", useless), OtherModel("linear model", value)))


CASES: dict[str, tuple[Document, list[str]]] = {
    "healthy": (document(falling, noise=0.02, accuracy=lambda t: 0.95 - 0.5 * math.exp(-9 * t), analysis=classifier()), []),
    "healthy, noisy start": (document(lambda t: falling(t) + 0.3 * math.exp(-20 * t), noise=0.05), []),
    "loss near zero": (document(lambda t: 2 * math.exp(-14 * t), noise=0.0002), []),
    "short": (document(falling, steps=MIN_POINTS - 1), []),
    "over-fitting, accuracy falls": (document(falling, accuracy=lambda t: 0.9 - abs(t - 0.4) / 4), ["Overfitting"]),
    "over-fitting, held-out loss rises": (
        document(falling, held_out_loss=lambda t: 0.3 + (t - 0.3) ** 2),
        ["Overfitting"],
    ),
    "over-fitting, only at the end": (document(falling, analysis=classifier(accuracy=0.9, log_loss=0.6)), ["Overfitting"]),
    "accuracy varies a little": (document(falling, accuracy=lambda t: 0.9 + 0.005 * math.sin(40 * t)), []),
    "noisy loss": (document(lambda t: 0.8 + math.exp(-8 * t), noise=0.5), ["NoisyLoss"]),
    "learning rate too high, rises again": (document(lambda t: 0.5 + 2 * abs(t - 0.3), noise=0.05), ["LearningRateTooHigh"]),
    "learning rate too high, never falls": (document(lambda t: 2.3 + 9 * t, noise=1), ["LearningRateTooHigh"]),
    "learning rate too high, explodes once": (
        document(lambda t: 2.3 + (5000 if 0.01 < t < 0.02 else 0)),
        ["LearningRateTooHigh"],
    ),
    "learning rate too high, falls only at first": (
        document(lambda t: 2.3 if t < 0.02 else 1.7 if t < 0.03 else 2.4, noise=0.04),
        ["LearningRateTooHigh"],
    ),
    "policy gradient, around zero": (document(lambda t: 0.5 * math.sin(90 * t), noise=2, signed=True), []),
    "policy gradient, around zero, few steps": (document(lambda _: 0.0, noise=2, signed=True, steps=30), []),
    "policy gradient, episodes get longer": (
        document(lambda t: (1 + 20 * t) * math.sin(777 * t), noise=1, signed=True),
        [],
    ),
    "negative log-likelihood below zero": (document(lambda t: 3 * math.exp(-8 * t) - 1, noise=0.05, signed=True), []),
    "negative log-likelihood below zero, rises again": (
        document(lambda t: 4 * abs(t - 0.4) - 1, noise=0.1, signed=True),
        ["LearningRateTooHigh"],
    ),
    "noise that looks like a rise": (document(lambda t: 1.5 if t < 0.02 else 1.0, noise=0.3, seed=1), ["NoisyLoss"]),
    "metric with a similar name": (document(lambda t: 2.3 + 9 * t, noise=1, metrics={"scale_factor": lambda t: t}),
                                   ["LearningRateTooHigh"]),
    "values of a critic rise with the returns": (
        document(lambda t: 0.1 + 30 * t, noise=1, metrics={"mean_reward": lambda t: 20 + 180 * t}),
        [],
    ),
    "loss of a generator": (
        document(lambda t: 0.7 + 4 * t, noise=0.5, metrics={"loss_G": lambda t: 0.7 + 4 * t, "loss_D": lambda t: 0.5 - 0.4 * t}),
        [],
    ),
    "harder data, accuracy improves": (
        document(lambda t: 1.0 + 2 * t, noise=0.05, accuracy=lambda t: 0.3 + 0.5 * t),
        [],
    ),
    "learning rate too high, accuracy improves only at first": (
        document(lambda t: 0.5 + 4 * abs(t - 0.3), noise=0.05, accuracy=lambda t: 0.8 - abs(t - 0.3)),
        ["LearningRateTooHigh"],
    ),
    "too slow": (document(lambda t: 2.3 - 0.16 * t, noise=0.003), ["NotConverged"]),
    "too slow, a few points": (document(lambda t: 2.3 - 0.1 * t, steps=3), ["NotConverged"]),
    "accuracy of a model that does not learn": (
        document(lambda t: 2.303 - 0.01 * t, noise=0.03, accuracy=lambda t: 0.12 if t < 0.5 else 0.08),
        ["NotLearning"],
    ),
    "not converged": (document(lambda t: 2.3 - 1.5 * t, noise=0.02), ["NotConverged"]),
    "not converged, but still running": (document(lambda t: 2.3 - 1.5 * t, phase=RunPhase.RUNNING), []),
    "not converged, but good enough": (document(lambda t: 2.3 - 1.5 * t, stopped=True), []),
    "constant loss": (document(lambda _: 2.302585), ["ConstantLoss"]),
    "constant loss of zero": (document(lambda _: 0.0), ["ConstantLoss"]),
    "random targets": (document(lambda t: 2.303 - 0.01 * t, noise=0.03), ["NotLearning"]),
    "inputs ignored": (
        document(falling, analysis=classifier(accuracy=0.5, log_loss=0.1)),
        ["NoBetterThanBaseline"],
    ),
    "class missed": (document(falling, analysis=classifier(accuracy=0.8, log_loss=0.1, missed=True)), ["MissedClass"]),
    "overconfident": (document(falling, analysis=classifier(accuracy=0.8, confidence=0.95)), ["Overconfident"]),
    "underconfident": (document(falling, analysis=classifier(accuracy=0.8, confidence=0.6)), ["Underconfident"]),
    "invalid predictions": (
        document(falling, analysis=Analysis("language", 90, 10, language=Language(256, 5.0, 2.3, 0.5))),
        ["InvalidPredictions"],
    ),
    "language model guesses": (
        document(falling, analysis=Analysis("language", 90, language=Language(256, 255.0, 8.0, 0.01))),
        ["NoBetterThanBaseline"],
    ),
    "regression predicts the mean": (
        document(falling, analysis=Analysis("regression", 90, regression=Regression(0, 1, 1, -0.01, 1, ()))),
        ["NoBetterThanBaseline"],
    ),
    "a linear model is better": (document(falling, analysis=beside(classifier(), 0.97)), ["WorseThanOtherModel"]),
    "a linear model is better by less than a standard error": (
        document(falling, analysis=beside(classifier(), 0.955)),
        [],
    ),
    "a linear regression is better": (
        document(falling, analysis=beside(Analysis("regression", 90, regression=Regression(0, 1, 1, 0.4, 1, ())), 0.6)),
        ["WorseThanOtherModel"],
    ),
    "a linear regression is about as good": (
        document(falling, analysis=beside(Analysis("regression", 90, regression=Regression(0, 1, 1, 0.4, 1, ())), 0.45)),
        [],
    ),
    "frequencies of pairs are better than a language model": (
        document(falling, analysis=beside(Analysis("language", 90, language=Language(256, 9.0, 3.2, 0.5)), 8.5)),
        ["WorseThanOtherModel"],
    ),
    "a language model is better than frequencies of pairs": (
        document(falling, analysis=beside(Analysis("language", 90, language=Language(256, 9.0, 3.2, 0.5)), 12.0)),
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_named_curve(name: str) -> None:
    run, expected = CASES[name]
    assert names(run) == expected, diagnose(run)


def test_noise_scale_decides_between_batch_and_learning_rate() -> None:
    def message(noise_samples: float | None) -> str:
        found = diagnose(document(lambda t: 0.8 + math.exp(-8 * t), noise=0.5, noise_samples=noise_samples))
        return found[0].message

    assert "globalBatchSize" in message(1000.0) and "noise scale" in message(1000.0)
    assert "globalBatchSize" not in message(70.0) and "lower learning rate" in message(None)


def test_findings_are_ordered_and_named_once() -> None:
    run = document(falling, accuracy=lambda t: 0.9 - abs(t - 0.4) / 4, analysis=classifier(accuracy=0.7, log_loss=1.0))
    found = names(run)
    assert found == sorted(set(found), key=Finding.ORDER.index) and "Overfitting" in found


@settings(max_examples=50)
@given(st.lists(st.floats(-1e9, 1e9), max_size=60), st.booleans())
def test_any_curve_has_findings_in_words(values: list[float], ended: bool) -> None:
    points = tuple(
        Point(step=step, steps=1, unix_s=step, loss=value, step_s=0.1, samples_per_s=1, world_size=1)
        for step, value in enumerate(values, start=1)
    )
    run = document(falling, phase=RunPhase.SUCCEEDED if ended else RunPhase.RUNNING)
    for finding in diagnose(run.model_copy(update={"points": points})):
        assert finding.name in Finding.ORDER and ". " in finding.message
