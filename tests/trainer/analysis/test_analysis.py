"""Laws of the analysis of held-out predictions: counts, merging over ranks, calibration, quantiles, bounds."""

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import TypeAdapter
from sklearn import metrics

from dltrain.analysis.collection import Collection, merged
from dltrain.analysis.result import MAX_CLASSES, MAX_POINTS, MAX_WRONG, OTHERS, Analysis

CUTS = st.lists(st.integers(0, 60), max_size=5).map(sorted)


def analysis(
    predictions: Any, targets: Any, cuts: list[int] | None = None, *, labels: tuple[str, ...] = (), task: Any = None
) -> Analysis:
    """Return the analysis of samples that are divided over ranks at the positions ``cuts``, in batches of 7."""
    ends = [0, *(cuts or []), len(targets)]
    packed = []
    for begin, end in itertools.pairwise(ends):
        part = Collection(task)
        for first in range(begin, end, 7):
            part.add(predictions[first : min(end, first + 7)], targets[first : min(end, first + 7)])
        packed.append(part.packed())
    found = merged(packed, labels)
    assert found is not None
    return found


def drawn_classes(seed: int, samples: int = 60, classes: int = 4) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    return random.normal(size=(samples, classes)), random.integers(0, classes, samples)


@settings(max_examples=20)
@given(st.integers(0, 10**6), CUTS)
@example(0, [0, 0, 60, 60])
def test_split_over_ranks_changes_nothing(seed: int, cuts: list[int]) -> None:
    logits, targets = drawn_classes(seed)
    numbers = np.random.default_rng(seed).normal(3, 2, 60)
    tokens = np.random.default_rng(seed).normal(size=(60, 5, 9)), np.random.default_rng(seed).integers(0, 9, (60, 5))
    for predicted, truth in ((logits, targets), (numbers + logits[:, 0], numbers), tokens):
        assert analysis(predicted, truth, cuts) == analysis(predicted, truth)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 40))
def test_confusion_matrix_counts_every_sample_once(seed: int, classes: int) -> None:
    logits, targets = drawn_classes(seed, 300, classes)
    found = analysis(logits, targets).classification
    assert found is not None and found.classes == classes
    matrix = np.array(found.confusion)
    assert matrix.sum() == 300 and len(found.names) == len(matrix) <= MAX_CLASSES + 1
    for row, figures in enumerate(found.figures):
        assert matrix[row].sum() == figures.support and matrix[:, row].sum() == figures.predicted
        assert matrix[row, row] == figures.correct
    assert (OTHERS in found.names) == (classes > MAX_CLASSES)


def test_figures_agree_with_scikit_learn() -> None:
    logits, targets = drawn_classes(5, 400)
    logits[np.arange(400), targets] += 1
    found = analysis(logits, targets).classification
    assert found is not None
    top = logits.argmax(1)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    precision, recall, f1, support = metrics.precision_recall_fscore_support(targets, top)
    assert [each.support for each in found.figures] == support.tolist()
    for name, values in (("precision", precision), ("recall", recall), ("f1", f1)):
        assert [getattr(each, name) for each in found.figures] == pytest.approx(values.tolist())
    assert found.confusion == tuple(map(tuple, metrics.confusion_matrix(targets, top).tolist()))
    assert found.macro_f1 == pytest.approx(f1.mean(), rel=1e-5)
    assert found.balanced_accuracy == pytest.approx(recall.mean(), rel=1e-5)
    assert found.log_loss == pytest.approx(metrics.log_loss(targets, probabilities), rel=1e-5)
    x = np.random.default_rng(1).normal(size=300)
    y = x + np.random.default_rng(2).normal(size=300) / 2 + 0.1
    numbers = analysis(y, x).regression
    assert numbers is not None
    assert numbers.r2 == pytest.approx(metrics.r2_score(x, y), rel=1e-5)
    assert numbers.rmse == pytest.approx(metrics.root_mean_squared_error(x, y), rel=1e-5)
    assert numbers.mae == pytest.approx(metrics.mean_absolute_error(x, y), rel=1e-5)
    assert numbers.bias == pytest.approx((y - x).mean(), rel=1e-5)


def test_calibration_error_of_a_calibrated_classifier_tends_to_zero() -> None:
    errors = []
    for samples in (300, 3_000, 100_000):
        random = np.random.default_rng(samples)
        logits = 2 * random.normal(size=(samples, 3))
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        targets = (random.random(samples)[:, None] > probabilities.cumsum(1)).sum(1)
        part = Collection()
        part.add(logits, targets)
        found = merged([part.packed()])
        assert found is not None and found.calibration is not None
        errors.append(found.calibration.error)
        sharper = Collection()
        sharper.add(3 * logits, targets)
        overconfident = merged([sharper.packed()])
        assert overconfident is not None and overconfident.calibration is not None
        assert overconfident.calibration.bias > 0.1 > abs(found.calibration.bias)
    assert errors[-1] < 0.005 < errors[0] and errors == sorted(errors, reverse=True)


def test_probabilities_and_their_logarithms_give_equal_figures() -> None:
    logits, targets = drawn_classes(3)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = analysis(logits, targets)
    for same in (probabilities, np.log(probabilities), torch.tensor(logits), torch.tensor(probabilities)):
        assert analysis(same, targets).classification == expected.classification
    two = probabilities[:, :2] / probabilities[:, :2].sum(1, keepdims=True)
    truth = targets % 2
    one = np.log(two[:, 1] / two[:, 0])
    binary = [analysis(each, truth, task="classification").classification for each in (two, two[:, 1], one)]
    assert binary[0] == binary[1] == binary[2]


def test_single_scores_are_logits_if_one_of_them_is_no_probability() -> None:
    """Fixed bug: each batch decided alone, so that a logit of 0.3 in a small last batch was class 0, not class 1."""
    scores = np.array([-2.0, 3.0, 1.5, -0.5, 0.2, 4.0, -1.0, 0.3, 0.4])
    truth = (scores > 0).astype(int)
    two = np.stack([np.zeros(9), scores], 1)
    for cuts in ([], [7], [7, 8]):
        for one in (scores, torch.from_numpy(scores)):
            found = analysis(one, truth, cuts, task="classification").classification
            assert found is not None and found == analysis(two, truth, cuts).classification and found.accuracy == 1


def test_most_wrong_examples_are_the_surest_errors() -> None:
    logits = np.array([[0.0, 5], [9, 0], [0, 3], [0, 8], [0, 2]])
    found = analysis(logits, np.array([0, 0, 1, 0, 0]), [2, 3], labels=("cat", "dog")).classification
    assert found is not None
    assert [(each.index, each.target, each.prediction) for each in found.wrong] == [
        (3, "cat", "dog"),
        (0, "cat", "dog"),
        (4, "cat", "dog"),
    ]
    part = Collection()
    part.add(logits, np.array([0, 0, 1, 0, 0]), index=[50, 51, 52, 53, 54])
    numbered = merged([part.packed(), part.packed()])
    assert numbered is not None and numbered.classification is not None
    assert {each.index for each in numbered.classification.wrong} == {50, 53, 54}
    residuals = analysis(np.array([1.0, 2.0, 9.0]), np.array([1.5, 2.0, 3.0]), [1]).regression
    assert residuals is not None and [each.index for each in residuals.wrong] == [2, 0, 1]


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80))
def test_quantiles_are_within_one_percent_of_a_residual_beside_them(residuals: list[float]) -> None:
    found = analysis(np.array(residuals), np.zeros(len(residuals))).regression
    assert found is not None
    ordered = sorted(residuals)
    for probability, value in found.quantiles:
        exact = ordered[int(probability * (len(ordered) - 1))]
        assert value == pytest.approx(exact, rel=0.011, abs=2e-12)


def test_perplexity_of_a_known_distribution() -> None:
    logits = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    targets = torch.tensor([[0, 1, -100], [7, -100, 2]])
    found = analysis(logits, targets)
    assert found.language is not None and (found.task, found.samples) == ("language", 4)
    assert found.language.perplexity == pytest.approx(8) and found.language.bits_per_token == pytest.approx(3)
    assert (found.baseline, found.metric) == (8, ("perplexity", found.language.perplexity))


def test_values_that_are_not_finite_are_counted_apart() -> None:
    logits, targets = drawn_classes(1)
    logits[5] = np.nan
    logits[9, 0] = np.inf
    found = analysis(logits, targets, [3, 30])
    assert (found.samples, found.invalid) == (58, 2)
    numbers = analysis(np.array([1.0, np.nan, 3.0]), np.array([1.0, 2.0, np.inf]))
    assert (numbers.samples, numbers.invalid) == (1, 2)
    huge = analysis(np.array([1e139, -1e200, 3.0]), np.array([0.0, 0.0, 3.0]))
    assert huge.regression is not None and np.isfinite(huge.regression.rmse) and huge.invalid == 1
    only = analysis(np.full((4, 3), np.nan), np.zeros(4, int))
    assert (only.samples, only.invalid, only.metric) == (0, 4, ("accuracy", 0.0))


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["array", "tensor"])
def test_probabilities_beside_a_row_that_is_not_finite_are_probabilities(odd: float, kind: Any) -> None:
    """Fixed bug: one such row made logits of all probabilities in its batch, so that the log loss was wrong."""
    sure = np.array([[0.9, 0.1], [0.2, 0.8]])
    expected = analysis(sure, np.array([0, 1])).classification
    found = analysis(kind(np.array([*sure, [odd, 0.5]])), np.array([0, 1, 0]))
    assert (found.samples, found.invalid) == (2, 1) and expected is not None and found.classification is not None
    assert found.classification.log_loss == pytest.approx(expected.log_loss)


def test_tensors_of_float64_keep_their_precision() -> None:
    """Fixed bug: they became float32, whose steps are 128 for times in seconds, so the error was 0."""
    truth = 1.7e9 + np.arange(40.0)
    found = analysis(torch.from_numpy(truth + 0.25), torch.from_numpy(truth)).regression
    assert found is not None and found == analysis(truth + 0.25, truth).regression
    assert found.rmse == pytest.approx(0.25, rel=1e-3)
    large = analysis(torch.tensor([1e60, 2e60], dtype=torch.float64), torch.tensor([1e60, 3e60], dtype=torch.float64))
    assert (large.samples, large.invalid) == (2, 0), "finite in float64, but not in float32"


def test_empty_parts() -> None:
    assert merged([Collection().packed(), Collection("language").packed()]) is None
    logits, targets = drawn_classes(2)
    empty = Collection()
    empty.add(logits[:0], targets[:0])
    empty.add(None, targets)
    full = Collection()
    full.add(logits, targets)
    assert merged([empty.packed(), full.packed()]) == merged([full.packed()]) is not None


@pytest.mark.parametrize(
    ("predictions", "targets", "task", "field"),
    [
        (np.zeros((4, 3)), np.zeros(5, int), None, "predictions"),
        (np.zeros((4, 3)), np.array([0, 1, 2, 3]), None, "targets"),
        (np.zeros((4, 3)), np.array([0, 1, 2, -1]), None, "targets"),
        (np.zeros(4), np.zeros(4, int), None, "task"),
        (np.zeros(4), np.zeros(4, int), "clustering", "task"),
        (np.zeros((4, 2)), np.zeros(4), None, "predictions"),
        (np.array(["a"]), np.array(["b"]), None, "predictions"),
        (np.zeros((4, 1)), np.zeros(4, int), "classification", "predictions"),
    ],
)
def test_values_that_do_not_fit_are_rejected(predictions: Any, targets: Any, task: Any, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}\b.*: found .*expected "):
        analysis(predictions, targets, task=task)


def test_ranks_with_different_tasks_are_rejected() -> None:
    classes, numbers = Collection(), Collection()
    classes.add(np.zeros((2, 2)), np.zeros(2, int))
    numbers.add(np.zeros(2), np.zeros(2))
    with pytest.raises(ValueError, match=r"^task: found"):
        merged([classes.packed(), numbers.packed()])


@settings(max_examples=2)
@given(st.integers(0, 1000))
def test_size_is_bounded_and_json_loses_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    adapter = TypeAdapter(Analysis)
    many = analysis(random.integers(0, 10_000, 5_000), random.integers(0, 10_000, 5_000), labels=("x" * 500,) * 10_000)
    numbers = analysis(random.normal(size=5_000), random.normal(size=5_000))
    assert many.classification is not None and numbers.regression is not None
    assert (len(many.classification.wrong), many.classification.classes) == (MAX_WRONG, 10_000)
    assert many.classification.calibration is None and len(numbers.regression.points) == MAX_POINTS
    for found in (many, numbers):
        text = adapter.dump_json(found)
        assert len(text) < 16_000 and adapter.validate_json(text) == found
        assert adapter.validate_python(asdict(found)) == found
