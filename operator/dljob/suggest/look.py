"""Look at the data of a job with ``spec.task``, and answer with a suggestion for the operator and the job's scripts."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, isfinite
from pathlib import Path

from dljob.api.spec import TaskType
from dljob.cluster import ClusterView
from dljob.job.task.suggestion import (
    BASELINE_S,
    FILES,
    MAX_ALTERNATIVES,
    MAX_ERROR,
    MAX_FINDINGS,
    MAX_LINE,
    MAX_LINES,
    MAX_NAME,
    MAX_SCRIPTS_NBYTES,
    Alternative,
    BaselineScore,
    JudgedBaseline,
    SuggestedModel,
    Suggestion,
    printable,
)
from dljob.suggest.bounded_trial import Judge
from dljob.suggest.errors import DataError, permission_checked
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.project import render
from dljob.suggest.reading.archive import is_archive
from dljob.suggest.reading.parquet import is_parquet_folder
from dljob.suggest.reading.text import text_files
from dljob.suggest.recommendation.accuracy import accuracy_class
from dljob.suggest.recommendation.limit import START_S, fitted, race_nbytes, with_race
from dljob.suggest.recommendation.model import Baseline, Settings
from dljob.suggest.recommendation.page import MEASURES, data_lines
from dljob.suggest.recommendation.prediction import Prediction, predicted
from dljob.suggest.subject import (
    IMAGE_CLASSIFICATION,
    LANGUAGE_MODELLING,
    TEXT_CLASSIFICATION,
    Options,
    Subject,
    read_subject,
)
from dljob.suggest.trial import TrialError

OPTION = {
    TaskType.TABULAR_CLASSIFICATION: "tabular-classification",
    TaskType.TABULAR_REGRESSION: "tabular-regression",
    TaskType.TEXT_CLASSIFICATION: TEXT_CLASSIFICATION,
    TaskType.LANGUAGE_MODELLING: LANGUAGE_MODELLING,
    TaskType.IMAGE_CLASSIFICATION: IMAGE_CLASSIFICATION,
}
"""Type of a task → value of the option ``--task`` of ``dljob suggest``."""
INSTALL_PYARROW = "Run pip install pyarrow, or convert the file to CSV."
"""End of a message about Parquet, which does not help in a pod."""
MIN_BASELINE_S = 5.0
"""A baseline with less time is not started, because Python and scikit-learn need seconds to start."""
_OTHERS = "--(?:encoding|delimiter|image-size|keep|test)"
"""Options of ``dljob suggest`` without a field in the spec."""
_VALUE = r"(?: (?:COLUMN|FILE|utf-[a-z0-9-]*[a-z0-9]|'[^']*'))?"
"""What may follow such an option in a message: its value, or a word for it."""
_QUOTED = r"(?<!\w)(?<!--delimiter )(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
"""A value from the data, as ``repr`` writes it. A message has it in quotes."""
_FIELDS = {"task": "spec.task.type", "target": "spec.task.target", "text": "spec.task.text"}


@dataclass(frozen=True)
class Question:
    """What a job asks about its data. ``uri``: the data's location, for messages; ``data``: where it is mounted."""

    data: Path
    uri: str
    task: TaskType
    target: str | None = None
    text: str | None = None
    within_s: float | None = None
    uid: str = ""
    digest: str = "0" * 32


def look(
    question: Question, view: ClusterView, clock: Callable[[], float], judge: Judge
) -> tuple[Suggestion, dict[str, str]]:
    """Return the suggestion, and file name → content of the scripts and of the scores of the baseline.

    Data that has to be corrected is a suggestion too. ``view``: the nodes for whose speed the limit of time is met.
    ``clock``: a function that returns seconds. ``judge``: a function that runs the baseline.
    """
    try:
        return _look(question, view, clock, judge)
    except DataError as error:
        text = printable(in_terms_of_the_spec(str(error), question), MAX_ERROR)
        return Suggestion(uid=question.uid, digest=question.digest, error=text), {}


def _look(
    question: Question, view: ClusterView, clock: Callable[[], float], judge: Judge
) -> tuple[Suggestion, dict[str, str]]:
    began_s = clock()
    _check_form(question)
    subject = read_subject(
        Options(
            question.data,
            OPTION[question.task],
            question.target,
            question.text,
            dataset_uri=question.uri,
            copies=False,
        )
    )
    reading_s, left_s = clock() - began_s, None
    if question.within_s is not None and question.within_s < (least_s := 2 * (START_S + reading_s)):
        raise DataError(
            f"spec.task.within: found {question.within_s:g}s; expected at least {ceil(least_s)}s, because the "
            "start of a training and reading the data take time. Raise it."
        )
    found, judged = _judged(question, subject, judge, clock, baseline_limit_s(question.within_s, reading_s))
    models = subject.models(found)
    if question.within_s is not None:
        left_s = question.within_s - (clock() - began_s)
        rows = fitted(models, _predict(subject, view), left_s, reading_s, 1.0)
        chosen, race = with_race(rows[0], models, left_s, reading_s, 1.0)
        if chosen.race:
            chosen = replace(chosen, why=f"{chosen.why}. A race chooses one of {race}")
        models = [chosen, *(settings for settings, _ in rows[1:])]
    project = subject.project(models[0], left_s)
    scripts = {
        name: text
        for name, text in (project if found is None else render.with_baseline(project, found)).items()
        if name in FILES
    }
    nbytes = sum(len(text.encode()) for text in scripts.values())
    if nbytes > MAX_SCRIPTS_NBYTES:
        raise DataError(
            f"{question.data}: found {nbytes >> 10} KiB of scripts, because each names all columns; expected at most "
            f"{MAX_SCRIPTS_NBYTES >> 10} KiB. Use fewer columns, or shorter names."
        )
    accuracy = [accuracy_class(each, subject.facts, found) for each in models]
    return _suggestion(question, subject, models, accuracy, judged, _of_trees(subject, found)), scripts


def baseline_limit_s(within_s: float | None, reading_s: float) -> float:
    """Return the seconds that the baseline may take: a quarter of ``spec.task.within``, and ``BASELINE_S``, at most.

    The training keeps the time that it needs to start, and to read the data as in ``reading_s`` seconds.
    """
    if within_s is None:
        return float(BASELINE_S)
    return min(BASELINE_S, within_s / 4, within_s - reading_s - 2 * (START_S + reading_s))


def _judged(
    question: Question, subject: Subject, judge: Judge, clock: Callable[[], float], limit_s: float
) -> tuple[Baseline | None, JudgedBaseline]:
    """Run the baseline, and return its result for recommendations (None without one) and for the suggestion."""
    began_s = clock()
    try:
        if limit_s < MIN_BASELINE_S:
            raise TrialError(
                f"spec.task.within leaves {max(0.0, limit_s):.0f} s for the baseline; expected at least "
                f"{MIN_BASELINE_S:.0f} s. Raise it"
            )
        found = judge(subject, limit_s)
    except TrialError as error:
        text = printable(in_terms_of_the_spec(str(error), question), MAX_LINE)
        return None, JudgedBaseline(seconds=_seconds(clock() - began_s), problem=text)
    scores = tuple(
        BaselineScore(
            model=name,
            validation=each.validation,
            error=each.error,
            test=each.test if isfinite(each.test) else None,  # The R² of one row is undefined.
        )
        for name, each in found.scores.items()
    )
    return found, JudgedBaseline(measure=found.scoring, scores=scores, seconds=_seconds(clock() - began_s))


def _seconds(value: float) -> float:
    return round(max(0.0, value), 3)


@permission_checked()
def _check_form(question: Question) -> None:
    """Raise DataError if there is no data, or data of a form that a job with a task cannot read."""
    path, tabular = question.data, question.task in (TaskType.TABULAR_CLASSIFICATION, TaskType.TABULAR_REGRESSION)
    if not path.exists():
        raise DataError(
            f"spec.dataset.uri: found no file or folder {question.uri!r}; expected data there that user 65532 may "
            "read. Correct the URI, or put the data there."
        )
    if question.task is TaskType.IMAGE_CLASSIFICATION:
        return
    other = path.is_dir() and not tabular and not text_files(path) and not is_parquet_folder(path)
    if path.suffix.lower() == ".npz" or is_archive(path) or other:
        raise DataError(
            f"spec.dataset.uri: found {question.uri!r}, which holds no table and no text file; expected one. For "
            "images, set spec.task.type: ImageClassification."
        )
    if path.is_dir() and tabular and not is_parquet_folder(path):
        raise DataError(
            f"spec.dataset.uri: found the folder {question.uri!r} with spec.task.type {question.task.value}; expected "
            "a file with a table. Name one file."
        )


def _predict(subject: Subject, view: ClusterView) -> Callable[[Settings], Prediction]:
    def predict(settings: Settings) -> Prediction:
        return predicted(render.job(settings, subject.source), view, subject.source.memory_nbytes)

    return predict


def _of_trees(subject: Subject, found: Baseline | None) -> list[str]:
    """Return a line that says that trees may be the better model; an empty list if they beat no linear model."""
    if found is None or not isinstance(subject.facts, TableFacts) or not found.trees_win:
        return []
    trees, linear = found.scores["trees"].validation, found.scores["linear model"].validation
    return [
        f"Trees reach {MEASURES[found.scoring]} {trees:.3g} on held-out folds of the training part, and a linear model "
        f"{linear:.3g}. Trees will probably do as well as a network on this table, or better, and train in seconds: "
        "status.result.comparison compares the trained model with them."
    ]


def _suggestion(
    question: Question,
    subject: Subject,
    models: list[Settings],
    accuracy: list[str],
    judged: JudgedBaseline,
    more: list[str],
) -> Suggestion:
    chosen, source = models[0], subject.source
    return Suggestion(
        uid=question.uid,
        digest=question.digest,
        model=SuggestedModel(
            name=printable(chosen.name, MAX_NAME),
            why=printable(chosen.why, MAX_LINE),
            parameters=chosen.parameters,
            flops_per_sample=float(chosen.flops_per_sample),
            activation_nbytes=chosen.activation_nbytes,
            batch=chosen.batch,
            epochs=chosen.epochs,
            samples=source.samples,
            sample_nbytes=source.sample_nbytes,
            data_nbytes=source.memory_nbytes + race_nbytes(chosen),
        ),
        alternatives=tuple(
            Alternative(
                model=printable(each.name, MAX_NAME),
                parameters=each.parameters,
                why=printable(f"{each.why}. Accuracy: {own}", MAX_LINE),
            )
            for each, own in list(zip(models, accuracy, strict=True))[1 : MAX_ALTERNATIVES + 1]
        ),
        data=tuple(printable(line, MAX_LINE) for line in data_lines(subject.facts)[:MAX_LINES]),
        findings=tuple(
            printable(in_terms_of_the_spec(line, question), MAX_LINE)
            for line in [*more, *subject.facts.findings][:MAX_FINDINGS]
        ),
        baseline=judged,
    )


def in_terms_of_the_spec(text: str, question: Question) -> str:
    """Return a message of ``dljob suggest`` with fields of the spec in place of its options and of the mounted path.

    Quoted values and the URI stay as they are: they come from users, and may hold the words of an option.
    """
    # A query may be secret, and the path of the mount says nothing to users.
    uri = question.uri.partition("?")[0]
    text = text.replace(question.uri, uri).replace(str(question.data), uri)
    text = text.replace(INSTALL_PYARROW, "Use an image of dljob, which has it, or convert the file to CSV.")
    parts = re.split(rf"({re.escape(uri)}|{_QUOTED})", text)
    return "".join(part if i % 2 else _translated(part) for i, part in enumerate(parts))


def _translated(text: str) -> str:
    for name, option in OPTION.items():
        text = re.sub(rf"--task {option}\b", f"spec.task.type: {name.value}", text)
        text = re.sub(rf"\b{option}\b", name.value, text)
    for option, field in _FIELDS.items():
        text = re.sub(rf"--{option}\b( COLUMN)?", field, text)
    text = re.sub(r"\b([Pp])ass spec\.", lambda m: f"{'Ss'[m[1] == 'p']}et spec.", text)
    return re.sub(rf"{_OTHERS}\b{_VALUE}", r"\g<0> of dljob suggest", text)
