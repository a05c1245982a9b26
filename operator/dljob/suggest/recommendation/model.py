"""Choose the model for a table (linear model or network, compared with trees) or for images, and its settings.

Constants name the reason or the measurement behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from dljob.suggest.inspection.columns import Kind
from dljob.suggest.inspection.images import ImageFacts
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.inspection.target import CLASSIFICATION

FLOPS_PER_WEIGHT = 6
"""Floating-point operations of a weight and sample, forward and backward: two each for output, input and weight."""
MAX_CATEGORIES = 32
"""As MAX_CATEGORIES in the written data.py."""
LINEAR_RATE = 0.1
"""Learning rate of linear models.

Measured on iris, five folds: 96.6 %, as with a solver. With 0.03 it was 93.9 %, because 1,000 steps of Adam ended
before the weights were as large as a weak penalty lets them become.
"""
MIN_STEPS, MAX_EPOCHS = 1000, 200
"""Bounds of the training. Chosen, not measured: small tables get enough steps of Adam to converge."""
MIN_RACE_ROWS = 100
"""Rows of the training part from which a race is of use: at least 20 of them judge. Chosen, not measured."""
RACE_PART = 0.5
"""Part of the time left to which train.py limits a race. A race that needs more chooses the recommended settings."""
LARGE_ROWS = 5000
"""Rows from which a network is recommended if no baseline was run."""
IMAGE_PASSES = 45_000
"""Image passes of a training: 30 epochs of 1,500 images. Chosen, not measured."""


PASS = 0.6
"""Time of judging a sample, as a part of the time of a sample in the training: the forward pass alone. Rounded up."""
HELD_OUT = 0.25
"""Samples of the test part for each one of the training part, if the test part is a fifth of the data."""


def evaluation(test: int, train: int) -> float:
    """Return the time of the evaluation, as a part of that of an epoch. ``test``: samples of a separate test part."""
    return PASS * (test / max(1, train) if test else HELD_OUT)


@dataclass(frozen=True)
class Candidate:
    """Settings that a race can choose. They change neither the size of a model nor the time of a step."""

    learning_rate: float
    penalty: float
    dropout: float


@dataclass(frozen=True)
class Settings:
    """The settings of a training. ``batch_range``: global batch sizes that keep the result, in samples."""

    name: str
    why: str
    parameters: int
    flops_per_sample: int
    activation_nbytes: int
    """Bytes of the activations of a sample."""
    loss: str
    batch: int
    batch_range: tuple[int, int]
    epochs: int
    learning_rate: float
    width: int = 0
    layers: int = 0
    length: int = 0
    """Words or bytes that the model reads of a document."""
    vocabulary: int = 0
    stages: tuple[int, ...] = ()
    dropout: float = 0.0
    penalty: float = 0.0
    augmentation: str = "none"
    flip: bool = False
    class_weights: bool = False
    rivals: tuple[Candidate, ...] = ()
    """Settings with which the recommended ones can be compared in a race; empty: a race is of no use."""
    race: bool = False
    """True: the training begins with a race."""
    evaluation: float = PASS * HELD_OUT
    """Time of the evaluation, as a part of that of an epoch."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Return the settings of a race, the recommended ones first."""
        return Candidate(self.learning_rate, self.penalty, self.dropout), *self.rivals


@dataclass(frozen=True)
class Score:
    """A score with its standard error on held-out folds of the training part, and the score on the test part."""

    validation: float
    error: float
    test: float


@dataclass(frozen=True)
class Baseline:
    """What models without deep learning reach. ``scoring``: name of the measure in scikit-learn."""

    scoring: str
    scores: Mapping[str, Score]
    """Name of the model → its score."""
    strength: float = 1.0
    """Weight of half the squared coefficients (classification) or all of them (regression) beside the summed loss."""
    test_part: str = ""
    """Digest of the test part, which tells whether a training was judged on the same one."""
    other_models: Mapping[str, float] = field(default_factory=dict)
    """Name of the model → main metric of the run report (accuracy, R² or perplexity) on the test part."""

    @property
    def trees_win(self) -> bool:
        """Return True if trees are better than the linear model by more than a standard error."""
        linear, trees = self.scores["linear model"], self.scores.get("trees")
        return trees is not None and trees.validation > linear.validation + max(linear.error, trees.error)


def table_inputs(facts: TableFacts) -> int:
    """Return the maximum number of inputs of the model that the project makes from a row of the table."""
    sizes = {Kind.NUMBER: 1, Kind.DATE: 5}
    return sum(
        min(c.distinct, MAX_CATEGORIES) + 1 if c.kind is Kind.CATEGORY else sizes[c.kind] + (c.missing + c.invalid > 0)
        for c in facts.columns
    )


def table_models(facts: TableFacts, baseline: Baseline | None) -> list[Settings]:
    """Return the recommended model of a table, then two alternatives.

    With a baseline, trees that beat the linear model on held-out folds are a reason for a network. Without one, the
    number of rows decides.
    """
    networks_pay = baseline.trees_win if baseline else facts.rows >= LARGE_ROWS
    measured = "on held-out folds of the training part"
    if baseline is None:
        because = f"the table has {facts.rows:,} rows, and no baseline was run"
    elif networks_pay:
        because = f"trees beat a linear model {measured}, so the target depends on combinations of columns"
    else:
        because = f"trees do not beat a linear model {measured}, so a network would mainly add variance"
    linear = _table(facts, baseline, "linear model", because, 0)
    width = 64 if facts.rows < LARGE_ROWS else 128
    small = _table(facts, baseline, f"network of two layers of {width}", because, width)
    large = _table(facts, baseline, f"network of two layers of {4 * width}", "more capacity, for more rows", 4 * width)
    return [small, linear, large] if networks_pay else [linear, small, large]


def _table(facts: TableFacts, baseline: Baseline | None, name: str, why: str, width: int) -> Settings:
    inputs, outputs = table_inputs(facts), len(facts.classes) or 1
    deep = inputs * width + width * width + width * outputs
    weights = inputs * outputs + deep
    biases = outputs + (2 * width + outputs if width else 0)
    train = facts.rows if facts.test_rows else round(0.8 * facts.rows)
    batch = power_of_two(train / 8, 16, 512)
    steps = ceil(train / batch)
    strength = baseline.strength if baseline else 1.0
    classify = facts.task == CLASSIFICATION
    rate, dropout = (0.003, 0.2) if width else (LINEAR_RATE, 0.0)
    penalty = strength / train / (2 if classify else 1)
    if width:
        others = ((rate, penalty, 0.0), (rate, 10 * penalty, dropout), (3 * rate, penalty, dropout))
    else:
        others = ((rate, penalty / 10, 0.0), (rate, 10 * penalty, 0.0), (rate, 100 * penalty, 0.0))
    # The baseline's cross-validation has chosen the penalty of a linear model already.
    useful = train >= MIN_RACE_ROWS and (width > 0 or baseline is None)
    return Settings(
        name=name,
        why=why,
        parameters=weights + biases,
        flops_per_sample=FLOPS_PER_WEIGHT * weights,
        activation_nbytes=4 * (inputs + outputs + 4 * width),
        loss="cross-entropy" if classify else "squared error",
        batch=batch,
        batch_range=(max(16, batch // 4), min(4 * batch, max(batch, train))),
        epochs=min(MAX_EPOCHS, max(10, ceil(MIN_STEPS / steps))),
        learning_rate=rate,
        width=width,
        dropout=dropout,
        penalty=penalty,
        class_weights=facts.rare,
        evaluation=evaluation(facts.test_rows, train),
        rivals=tuple(Candidate(*each) for each in others) if useful else (),
    )


def image_models(facts: ImageFacts) -> list[Settings]:
    """Return the recommended model for images, then a smaller and a larger alternative."""
    side = min(facts.size)
    depth = 2 if side < 16 else 3 if side < 48 else 4
    first = 32
    return [
        _images(facts, f"convolutional network of {depth} stages", "images of this size", first, depth),
        _images(facts, f"convolutional network of {depth} stages, half as wide", "a quarter of the time", 16, depth),
        _images(facts, f"convolutional network of {depth} stages, twice as wide", "four times the time", 64, depth),
    ]


def _images(facts: ImageFacts, name: str, why: str, first: int, depth: int) -> Settings:
    stages = tuple(first * 2**i for i in range(depth))
    pixels, inputs = facts.size[0] * facts.size[1], facts.channels
    parameters = flops = activations = 0
    for outputs in stages:
        weights = 9 * outputs * (inputs + outputs)
        parameters += weights + 4 * outputs
        flops += FLOPS_PER_WEIGHT * weights * pixels
        activations += 4 * 6 * outputs * pixels
        inputs, pixels = outputs, pixels // 4
    head = 4 * stages[-1] * len(facts.classes)
    train = facts.images if facts.test_images else round(0.8 * facts.images)
    batch = power_of_two(train / 16, 16, 128)
    colours = facts.channels == 3
    return Settings(
        name=name,
        why=why,
        parameters=parameters + head + len(facts.classes),
        flops_per_sample=flops + FLOPS_PER_WEIGHT * head,
        activation_nbytes=activations,
        loss="cross-entropy",
        batch=batch,
        batch_range=(max(16, batch // 2), max(batch, min(4 * batch, train))),
        epochs=min(60, max(5, ceil(IMAGE_PASSES / train))),
        learning_rate=0.005,
        stages=stages,
        augmentation="shift, turn, zoom" + (", mirror" if colours else ""),
        flip=colours,
        class_weights=facts.rare,
        evaluation=evaluation(facts.test_images, train),
    )


def power_of_two(value: float, low: int, high: int) -> int:
    """Return the largest power of two between ``low``, one itself, and ``high`` that ``value`` reaches, or ``low``."""
    found = low
    while found * 2 <= min(value, high):
        found *= 2
    return found
