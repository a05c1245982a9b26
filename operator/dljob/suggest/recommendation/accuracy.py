"""Say to which class the accuracy of a model will belong: near that of a model of the baseline, or better.

A class is no prediction of a score. It names the model without deep learning, whose score is measured, with which the
result has to be compared.
"""

from dljob.suggest.inspection.images import ImageFacts
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.inspection.text import TextFacts
from dljob.suggest.recommendation.model import LARGE_ROWS, Baseline, Settings
from dljob.suggest.recommendation.text import LARGE_DOCUMENTS

LINEAR, TREES, PAIRS = "linear model", "trees", "pairs of bytes"
"""Names of models of the baseline."""


def accuracy_class(settings: Settings, facts: TableFacts | ImageFacts | TextFacts, baseline: Baseline | None) -> str:
    """Return the class of a model, such as 'near linear model (0.975)', with the measured score of that model."""
    if isinstance(facts, ImageFacts):
        return f"better than {_named(LINEAR, baseline)}"
    if isinstance(facts, TextFacts):
        if not facts.classes:
            return f"better than {_named(PAIRS, baseline)}"
        few = settings.layers > 0 and facts.documents < LARGE_DOCUMENTS
        return f"{'at most' if few else 'near'} {_named(LINEAR, baseline)}"
    combined = baseline.trees_win if baseline else facts.rows >= LARGE_ROWS
    return f"near {_named(TREES if settings.width and combined else LINEAR, baseline)}"


def _named(model: str, baseline: Baseline | None) -> str:
    score = baseline.scores.get(model) if baseline else None
    return model if score is None else f"{model} ({score.validation:.3f})"
