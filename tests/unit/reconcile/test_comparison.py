"""The sentence in ``status.result`` that compares the model of a job with the baseline."""

import pytest

from dljob.api import ModelScore, ResultAnalysis
from dljob.api.status.suggestion import BaselineScoreStatus, BaselineStatus, SuggestionStatus
from dljob.status.comparison import MAX_LENGTH, comparison

RUN = BaselineStatus(
    measure="accuracy", scores=(BaselineScoreStatus(model="trees", validation=0.97, error=0.01, test=0.98),)
)
STOPPED = BaselineStatus(problem="the baseline took more than 120 s and was stopped", seconds=120.0)
BYTES = BaselineStatus(
    measure="bits_per_byte", scores=(BaselineScoreStatus(model="pairs of bytes", validation=3, error=0, test=3),)
)


def suggestion(baseline: BaselineStatus | None = RUN) -> SuggestionStatus:
    return SuggestionStatus(
        model="linear model", why="few rows", parameters=9, baseline=baseline, config_map="iris-suggestion"
    )


def analysis(value: float, metric: str = "accuracy", **others: float) -> ResultAnalysis:
    models = tuple(ModelScore(name=name.replace("_", " "), value=score) for name, score in others.items())
    return ResultAnalysis(task="classification", samples=30, metric=metric, value=value, other_models=models or None)


def test_a_better_baseline_is_named_with_the_command_that_uses_it() -> None:
    text = comparison(analysis(0.9, linear_model=0.93, trees=0.98), True, suggestion(), "iris")
    assert text is not None
    assert text.startswith("trees: accuracy 0.98, better than this model (0.9). To use the baseline: dljob get-model ")
    assert " iris DIR --all, then" in text
    assert "baseline.py --predict" in text


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (analysis(0.97, linear_model=0.93, trees=0.95), "this model: accuracy 0.97, better than trees (0.95)"),
        (analysis(0.94, linear_model=0.93, trees=0.95), "trees: accuracy 0.95, about as good as this model (0.94)"),
        (analysis(0.95, trees=0.95), "trees: accuracy 0.95, about as good as this model (0.95)"),
        (analysis(3.0, "perplexity", pairs=8.5), "this model: perplexity 3, better than pairs (8.5)"),
        (analysis(9.0, "perplexity", pairs=8.95), "pairs: perplexity 8.95, about as good as this model (9)"),
    ],
)
def test_the_best_of_the_other_models_is_compared(found: ResultAnalysis, expected: str) -> None:
    assert comparison(found, False, suggestion(), "iris") == expected


@pytest.mark.parametrize(
    ("baseline", "metric", "expected"),
    [
        (STOPPED, "accuracy", "the baseline took more than 120 s and was stopped"),
        (RUN, "accuracy", "another test part"),
        (RUN, "RMSE", "R2 is undefined"),
    ],
)
def test_a_missing_comparison_has_a_reason(baseline: BaselineStatus, metric: str, expected: str) -> None:
    text = comparison(analysis(0.9, metric), False, suggestion(baseline), "iris")
    assert text is not None and text.startswith("No comparison with a baseline: ") and expected in text


def test_a_job_with_nothing_to_compare_has_no_comparison() -> None:
    assert comparison(None, False, suggestion(), "iris") is None
    assert comparison(analysis(0.9), False, None, "iris") is None
    assert comparison(analysis(0.9), False, suggestion(None), "iris") is None, "a suggestion of an earlier release"


def test_scripts_and_language_models_have_other_remedies() -> None:
    own = comparison(analysis(0.9, trees=0.98), True, None, "iris")
    language = comparison(analysis(9.0, "perplexity", pairs=8.0), True, suggestion(BYTES), "iris")
    assert own is not None and language is not None and "get-model" not in own + language
    long = comparison(analysis(0.9, "accuracy", **{64 * "x": 0.98}), True, suggestion(), 253 * "j")
    assert long is not None and len(long) <= MAX_LENGTH
