"""Tests of the page's sections about held-out data and findings: the values in them, escaping, and their size."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from dlcontract import MAX_OTHER_MODELS as MAX_IN_STATUS
from dlcontract import Outcome, RunPhase
from dltrain.analysis.collection import Collection, merged
from dltrain.analysis.result import MAX_CLASSES, MAX_NAME, MAX_OTHER_MODELS, Analysis, OtherModel
from dltrain.protocol.rank_messages import Analyzed, Step
from dltrain.record.job_logs import REPORT_LIMIT_NBYTES, stored_nbytes
from dltrain.record.run_report import files
from dltrain.record.run_report.document import Document, Finding
from dltrain.record.run_report.held_out import TITLES
from dltrain.record.run_report.history import History
from dltrain.record.run_report.page import page
from dltrain.record.run_report.summary import with_summary
from support.trainer.plans import make_plan


def analysis(predictions: np.ndarray, targets: np.ndarray, labels: tuple[str, ...] = ()) -> Analysis:  # type: ignore[type-arg]
    part = Collection()
    part.add(predictions, targets)
    found = merged([part.packed()], labels)
    assert found is not None
    return found


def document(found: Analysis, *, steps: int = 20) -> Document:
    """Return a run whose loss rises again, with an analysis after its last step."""
    plan = make_plan(1)
    history = History(plan, 0.0)
    history.begin_attempt(plan, plan, 0.0)
    for step in range(1, steps + 1):
        history.record(
            Step(rank=0, step=step, steps=steps, loss=1 + abs(step - 5), step_s=1, samples_per_s=1, world_size=1),
            0,
            step,
        )
    history.record(Analyzed(rank=0, step=steps, analysis=found), 0, 99.0)
    made = history.document(RunPhase.SUCCEEDED, 1, 100.0)
    assert Document.parse(made.to_json()) == made
    return made


def tree(found: Analysis) -> ElementTree.Element:
    return ElementTree.fromstring(page(document(found)))


def cells(root: ElementTree.Element, table: str) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in root.findall(f".//table[@id='{table}']/tbody/tr")]


def test_classifier() -> None:
    logits = np.array([[4.0, 0], [0, 3], [5, 0], [0, 1]])
    root = tree(analysis(logits, np.array([0, 1, 1, 1]), ("<cat>", "dog & co")))
    assert cells(root, "classes") == [
        ["<cat>", "1", "2", "1", "0.500", "1.000", "0.667"],
        ["dog & co", "3", "2", "2", "1.000", "0.667", "0.800"],
    ]
    assert cells(root, "wrong") == [["2", "dog & co", "<cat>", "0.993"]]
    matrix = root.find(".//svg[@aria-label='Confusion matrix: targets (rows) and predictions']")
    assert matrix is not None
    titles = ["".join(title.itertext()) for title in matrix.iter("title")]
    assert titles == ["<cat> as <cat>: 1, 100 %", "<cat> as dog & co: 0, 0 %", "dog & co as <cat>: 1, 33.3 %",
                      "dog & co as dog & co: 2, 66.7 %"]  # fmt: skip
    findings = root.findall(".//ul[@id='findings']/li")
    assert "learning rate" in "".join(findings[0].itertext())


def test_regression_and_language_model() -> None:
    x = np.linspace(0, 1, 50)
    root = tree(analysis(x + 0.1, x))
    assert len(root.findall(".//svg[@aria-label='Predictions and targets']/circle")) == 50
    assert float(cells(root, "residuals")[3][1]) == pytest.approx(0.1, rel=0.02)
    assert len(cells(root, "wrong")) == 20 and "+0.1" in "".join(root.itertext())
    random = np.random.default_rng(0)
    text = "".join(tree(analysis(random.normal(size=(9, 5, 7)), random.integers(0, 7, (9, 5)))).itertext())
    assert "perplexity of guessing7" in text and "Calibration: accuracy by confidence" in text


def test_other_models_are_compared_in_the_order_of_their_metric() -> None:
    others = (OtherModel("trees", 0.5), OtherModel("linear <model>", 0.97))
    found = replace(analysis(np.eye(2)[[0, 1, 1, 1]], np.array([0, 1, 1, 0])), other_models=others)
    expected = [
        ["linear <model>", "97.00 %"],
        ["this model", "75.00 %"],
        ["trees", "50.00 %"],
        ["without inputs", "50.00 %"],
    ]
    assert cells(tree(found), "compared") == expected
    random = np.random.default_rng(0)
    language = analysis(random.normal(size=(9, 5, 7)), random.integers(0, 7, (9, 5)))
    rows = cells(tree(replace(language, other_models=(OtherModel("pairs of bytes", 2.5),))), "compared")
    assert rows[0][0] == "pairs of bytes", "the lowest perplexity is the best"
    assert cells(tree(language), "compared") == []
    short = with_summary(Outcome(steps=20, seconds=1), document(found)).analysis
    assert short is not None and [(each.name, each.value) for each in short.other_models] == [
        ("trees", 0.5),
        ("linear <model>", 0.97),
    ]


def test_short_form_for_the_operator_is_bounded() -> None:
    random = np.random.default_rng(0)
    names = tuple(f"{number:04d}" + "n" * MAX_NAME for number in range(300))
    scores = random.normal(size=(2_000, 300))
    made = document(analysis(scores, random.integers(0, 300, 2_000), names))
    long = made.model_copy(update={"findings": (Finding(name="Overfitting", message="x" * 2_000),) * 20})
    short = with_summary(Outcome(steps=20, seconds=1), long)
    assert Outcome.model_validate_json(short.model_dump_json()) == short and len(short.model_dump_json()) < 6_000
    assert short.analysis is not None and len(short.analysis.worst_classes) == 3 and len(short.findings) == 8
    x = np.linspace(0, 1, 50)
    numbers = with_summary(short, document(analysis(x, x))).analysis
    assert numbers is not None and (numbers.metric, numbers.value, numbers.baseline) == ("R2", 1, 0)
    assert numbers.calibration_error is None and numbers.worst_classes == ()


def test_largest_page_fits_into_the_config_map() -> None:
    random = np.random.default_rng(0)
    names = tuple(f"{number:04d}" + "n" * MAX_NAME for number in range(300))
    scores = random.normal(size=(20_000, 300))
    made = document(analysis(scores, random.integers(0, 300, 20_000), names), steps=512)
    assert made.analysis is not None and made.analysis.analysis.classification is not None
    assert len(made.analysis.analysis.classification.confusion) == MAX_CLASSES + 1
    packed = files.packed(files.rendered(made))
    assert len(packed) == 2 and sum(map(stored_nbytes, packed.values())) < 0.6 * REPORT_LIMIT_NBYTES


def test_status_has_room_for_all_other_models() -> None:
    assert MAX_IN_STATUS == MAX_OTHER_MODELS


def test_every_finding_has_a_title() -> None:
    assert set(TITLES) == set(Finding.ORDER)


def test_restart_before_the_analysed_step_drops_the_analysis() -> None:
    """The model of that step is gone, and the steps are trained again."""
    found, plan = analysis(np.eye(2), np.array([0, 1])), make_plan(1)
    history = History(plan, 0.0)
    for steps, kept in ((range(1, 10), True), (range(5, 6), False)):
        history.begin_attempt(plan, plan, 0.0)
        for step in steps:
            history.record(Step(rank=0, step=step, steps=20, step_s=1, samples_per_s=1, world_size=1), 0, step)
        if kept:
            history.record(Analyzed(rank=0, step=9, analysis=found), 0, 9.0)
        assert (history.document(RunPhase.RUNNING, 1, 10.0).analysis is not None) == kept
