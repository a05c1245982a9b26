"""The accuracy class of a model names the model of the baseline with which it has to be compared."""

from dataclasses import replace
from pathlib import Path

import pytest

from dljob.suggest.recommendation.accuracy import accuracy_class
from dljob.suggest.recommendation.model import Baseline, Score
from dljob.suggest.subject import Options, Subject, read_subject
from support.generated_data import arrays, binary, class_files, real, sources, table

EQUAL = Baseline("accuracy", {"linear model": Score(0.9, 0.01, 0.9), "trees": Score(0.9, 0.01, 0.9)})
TREES = replace(EQUAL, scores=EQUAL.scores | {"trees": Score(0.95, 0.01, 0.9)})


def classes(subject: Subject, baseline: Baseline | None) -> list[str]:
    """Return the classes of the recommended model and of its alternatives."""
    return [accuracy_class(each, subject.facts, baseline) for each in subject.models(baseline)]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        (EQUAL, ["near linear model (0.900)"] * 3),
        (TREES, ["near trees (0.950)", "near linear model (0.900)", "near trees (0.950)"]),
        (None, ["near linear model"] * 3),
    ],
)
def test_networks_for_tables_are_near_trees_if_these_win(
    baseline: Baseline | None, expected: list[str], tmp_path: Path
) -> None:
    subject = read_subject(Options(table({"a": real, "target": binary})(tmp_path)))
    assert classes(subject, baseline) == expected


def test_networks_for_images_are_expected_to_beat_the_linear_model(tmp_path: Path) -> None:
    assert classes(read_subject(Options(arrays((8, 8))(tmp_path))), EQUAL) == ["better than linear model (0.900)"] * 3


def test_a_transformer_needs_more_than_a_few_documents(tmp_path: Path) -> None:
    near = "near linear model (0.900)"
    assert classes(read_subject(Options(class_files()(tmp_path))), EQUAL) == [
        near,
        near,
        "at most linear model (0.900)",
    ]


def test_a_language_model_has_to_beat_pairs_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(sources(), encoding="utf-8")
    assert classes(read_subject(Options(tmp_path / "a.txt")), None) == ["better than pairs of bytes"] * 3
