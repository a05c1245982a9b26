"""The results of an analysis. Their size is bounded, because they go into the run report. It needs no other package."""

from dataclasses import dataclass
from typing import Literal

Task = Literal["classification", "regression", "language"]

MAX_CLASSES = 20
"""Maximum number of classes with metrics of their own. A page can show a confusion matrix of this size."""
MAX_WRONG = 20
"""Maximum number of most-wrong examples."""
MAX_POINTS = 200
"""Maximum number of (target, prediction) pairs of a regression that a plot shows."""
BINS = 15
"""Number of confidence bins of equal width. Guo et al. 2017, "On calibration of modern neural networks", use 15."""
MAX_OTHER_MODELS = 5
"""Maximum number of models with which an analysis compares the trained one."""
MAX_NAME = 64
"""Maximum length of a class name in characters. Longer names are cut."""
OTHERS = "others"
"""Name of the row and the column of a confusion matrix that sum up the classes without a row of their own."""


@dataclass(frozen=True)
class ClassFigures:
    """Figures of one class. ``support``: its samples. ``predicted``: samples that the model assigned to it.

    ``precision``: part of ``predicted`` that is correct; None if ``predicted`` is 0. ``recall``: part of ``support``
    that is correct; None if ``support`` is 0. ``f1``: their harmonic mean; None if both counts are 0.
    """

    name: str
    support: int
    predicted: int
    correct: int
    precision: float | None
    recall: float | None
    f1: float | None


@dataclass(frozen=True)
class Bin:
    """The predictions in one interval of confidence (probability of the predicted class).

    ``confidence`` and ``accuracy`` are means over its ``samples``.
    """

    confidence: float
    accuracy: float
    samples: int


@dataclass(frozen=True)
class Calibration:
    """Agreement of confidence and accuracy. ``error``: expected calibration error (ECE), from 0 (perfect) to 1.

    The ECE is the mean over samples of |accuracy - confidence| of the sample's bin (Naeini et al. 2015). ``bins``: the
    bins that contain samples, by ascending confidence.
    """

    error: float
    bins: tuple[Bin, ...]

    @property
    def bias(self) -> float:
        """Mean confidence minus accuracy. A positive value means that the model is overconfident."""
        samples = sum(each.samples for each in self.bins)
        return sum((each.confidence - each.accuracy) * each.samples for each in self.bins) / samples if samples else 0.0


@dataclass(frozen=True)
class WrongExample:
    """A sample that the model got wrong. ``index``: its number in the held-out data, unless the script gave others.

    ``probability``: that of the wrong class; None if unknown or for a regression.
    """

    index: int
    target: str
    prediction: str
    probability: float | None = None


@dataclass(frozen=True)
class Classification:
    """Figures of a classifier.

    ``classes``: number of classes. ``baseline_accuracy``: accuracy of always predicting the most frequent class of the
    held-out data. ``balanced_accuracy``: mean recall over classes with samples. ``macro_f1``: mean F1 over classes with
    samples. ``log_loss``: mean negative log-likelihood in nats. ``figures``: of all classes or, if there are more than
    ``MAX_CLASSES``, of those with the most errors. ``confusion``: samples by target (rows) and prediction (columns), in
    the order of ``figures``, then of ``others`` if ``figures`` leaves classes out. ``wrong``: errors with the highest
    probability.
    """

    classes: int
    accuracy: float
    baseline_accuracy: float
    balanced_accuracy: float
    macro_f1: float
    figures: tuple[ClassFigures, ...]
    confusion: tuple[tuple[int, ...], ...]
    log_loss: float | None = None
    calibration: Calibration | None = None
    wrong: tuple[WrongExample, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rows and columns of ``confusion``."""
        names = tuple(each.name for each in self.figures)
        return names if len(names) == len(self.confusion) else (*names, OTHERS)

    @property
    def worst(self) -> ClassFigures | None:
        """The class with the lowest F1 among the figures of classes with samples; None if all of them are perfect."""
        rated = [each for each in self.figures if each.f1 is not None and each.f1 < 1 and each.support]
        return min(rated, key=lambda each: (each.f1, each.name), default=None)


@dataclass(frozen=True)
class Regression:
    """Figures of a regression. Residuals are predictions minus targets, in the units of the target.

    ``bias``: mean residual. ``rmse``: root of the mean squared residual. ``mae``: mean absolute residual. ``r2``: 1 -
    (sum of squared residuals) / (sum of squared deviations of targets from their mean), None if all targets are equal.
    ``baseline_rmse``: RMSE of always predicting the mean target of the held-out data. ``quantiles``: pairs
    (probability, residual), within 1 % of the residual. ``points``: a fixed random sample of (target, prediction).
    ``wrong``: the largest residuals.
    """

    bias: float
    rmse: float
    mae: float
    r2: float | None
    baseline_rmse: float
    quantiles: tuple[tuple[float, float], ...]
    points: tuple[tuple[float, float], ...] = ()
    wrong: tuple[WrongExample, ...] = ()


@dataclass(frozen=True)
class Language:
    """Figures of a language model. ``perplexity``: exp of the mean negative log-likelihood of a token.

    ``vocabulary``: number of tokens that the model knows, which is also the perplexity of guessing. ``accuracy``: part
    of tokens for which the most probable token is correct.
    """

    vocabulary: int
    perplexity: float
    bits_per_token: float
    accuracy: float
    calibration: Calibration | None = None


@dataclass(frozen=True)
class OtherModel:
    """Another model on the same held-out data, such as a linear one. ``value``: the main metric of the task."""

    name: str
    value: float


@dataclass(frozen=True)
class Analysis:
    """The analysis of a model on held-out data. One of ``classification``, ``regression`` and ``language`` is set.

    ``samples``: number of predictions that the figures cover (for a language model: tokens). ``invalid``: further
    predictions that are NaN or infinite, which no figure covers. ``other_models``: as the script named them; none
    if the main metric is the RMSE.
    """

    task: Task
    samples: int
    invalid: int = 0
    classification: Classification | None = None
    regression: Regression | None = None
    language: Language | None = None
    other_models: tuple[OtherModel, ...] = ()

    @property
    def metric(self) -> tuple[str, float]:
        """Name and value of the main metric: accuracy, R² (or RMSE if R² is undefined), or perplexity."""
        if self.classification is not None:
            return "accuracy", self.classification.accuracy
        if self.regression is not None:
            return ("RMSE", self.regression.rmse) if self.regression.r2 is None else ("R2", self.regression.r2)
        assert self.language is not None, "one of the three is set"
        return "perplexity", self.language.perplexity

    @property
    def baseline(self) -> float | None:
        """The main metric of a model that ignores its inputs; None if it is undefined."""
        if self.classification is not None:
            return self.classification.baseline_accuracy
        if self.regression is not None:
            return None if self.regression.r2 is None else 0.0
        assert self.language is not None, "one of the three is set"
        return float(self.language.vocabulary)

    @property
    def best_other(self) -> OtherModel | None:
        """The best of the other models; None without any."""
        sign = -1 if self.language is not None else 1  # The lowest perplexity is the best one.
        return max(self.other_models, key=lambda each: sign * each.value, default=None)

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of a classifier or a language model; None if no probabilities are known."""
        figures = self.classification or self.language
        return None if figures is None else figures.calibration

    def line(self) -> str:
        """Return the most important metrics in one line of text."""
        name, value = self.metric
        parts = [f"{name} {value:.4g} on {self.samples} held-out {'tokens' if self.language else 'samples'}"]
        if self.baseline is not None:
            parts.append(f"without inputs {self.baseline:.4g}")
        parts += [f"{each.name} {each.value:.4g}" for each in self.other_models]
        if self.classification is not None and (worst := self.classification.worst) is not None:
            parts.append(f"worst class {worst.name} (F1 {worst.f1:.3g})")
        if self.regression is not None:
            parts.append(f"RMSE {self.regression.rmse:.4g}, bias {self.regression.bias:.3g}")
        if self.calibration is not None:
            parts.append(f"calibration error {self.calibration.error:.3g}")
        if self.invalid:
            parts.append(f"{self.invalid} predictions are NaN or infinite")
        return ", ".join(parts)
