"""Say in one sentence how the model of a complete job compares with other models, such as the baseline."""

from dljob.api import ModelScore, ResultAnalysis
from dljob.api.status.suggestion import BaselineStatus, SuggestionStatus

LOWER_IS_BETTER = ("perplexity", "RMSE")
MAX_LENGTH = 600
WORSE_THAN_OTHER = "WorseThanOtherModel"
"""Name of the trainer's finding that another model is better by more than a standard error."""


def comparison(
    analysis: ResultAnalysis | None, clearly_worse: bool, suggestion: SuggestionStatus | None, job: str
) -> str | None:
    """Return the sentence; None if the job has nothing to compare.

    ``clearly_worse``: True if the trainer found another model to be better by more than a standard error.
    ``suggestion``: the choice for ``spec.task``; None for jobs without it. ``job``: name of the job, for the command
    that fetches the better model.
    """
    if analysis is None:
        return None
    if not analysis.other_models:
        text = _not_compared(analysis, suggestion.baseline if suggestion is not None else None)
        return None if text is None else f"No comparison with a baseline: {text}"[:MAX_LENGTH]
    best = best_of(analysis.metric, analysis.other_models)
    own, others = f"{analysis.value:.4g}", f"{best.value:.4g}"
    if clearly_worse:
        text = f"{best.name}: {analysis.metric} {others}, better than this model ({own})"
        return f"{text}. {_remedy(suggestion, job)}"[:MAX_LENGTH]
    if best_of(analysis.metric, (ModelScore(name="", value=analysis.value), best)) is best or own == others:
        return f"{best.name}: {analysis.metric} {others}, about as good as this model ({own})"
    return f"this model: {analysis.metric} {own}, better than {best.name} ({others})"


def best_of(metric: str, models: tuple[ModelScore, ...]) -> ModelScore:
    """Return the model with the best value of ``metric``."""
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return max(models, key=lambda each: sign * each.value)


def _not_compared(analysis: ResultAnalysis, baseline: BaselineStatus | None) -> str | None:
    if baseline is None:
        return None
    if baseline.problem is not None:
        return baseline.problem
    if analysis.metric == "RMSE":
        return "R2 is undefined, because the targets of the test part are equal"
    return "the training was judged on another test part than the baseline, as with another SEED"


def _remedy(suggestion: SuggestionStatus | None, job: str) -> str:
    if suggestion is None:
        return "Use that model, or improve this one"
    if suggestion.baseline is not None and suggestion.baseline.measure == "bits_per_byte":
        return "Train this model for more epochs, or with more text"
    return (
        f"To use the baseline: dljob get-model {job} DIR --all, then DLJOB_DATASET=TRAINING_DATA python "
        "DIR/baseline.py --predict NEW_DATA, which needs scikit-learn"
    )
