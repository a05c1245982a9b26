"""The look pod's program: data and a task become a suggestion and scripts, or one error in terms of the spec."""

import ast
import contextlib
import csv
import errno
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dljob.api.spec import TaskType
from dljob.cli import look as program
from dljob.cluster import cluster_view
from dljob.job.task.suggestion import JUDGED, RACE, SCRIPTS, SUGGESTION_KEY, Suggestion
from dljob.suggest.look import Question, baseline_limit_s, in_terms_of_the_spec, look
from dljob.suggest.recommendation.model import Baseline, Score
from dljob.suggest.subject import Subject
from support.generated_data import class_files
from support.projects import NOT_RUN, no_baseline

NODE = cluster_view({"nodes": [{"name": "n", "cpu": 2, "memory": "4Gi"}]})
URI = "https://data.example/people.csv?token=secret"


def people(path: Path, count: int = 60, last: str = "") -> Path:
    draw = random.Random(1)
    ages = [draw.randint(18, 80) for _ in range(count)]
    lines = ["age,income,bought", *(f"{a},{draw.random():.4f},{'yes' if a > 45 else 'no'}" for a in ages), last]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def asked(
    path: Path, task: TaskType = TaskType.TABULAR_CLASSIFICATION, **more: Any
) -> tuple[Suggestion, dict[str, str]]:
    return look(Question(path, URI, task, uid="u", digest="a" * 32, **more), NODE, lambda: 0.0, no_baseline)


def error(path: Path, task: TaskType = TaskType.TABULAR_CLASSIFICATION, **more: Any) -> str:
    suggestion, scripts = asked(path, task, **more)
    assert not scripts and suggestion.error is not None
    assert "--" not in suggestion.error and str(path) not in suggestion.error and "secret" not in suggestion.error
    return suggestion.error


def test_parquet_without_its_package_names_what_helps_in_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "people.parquet").write_bytes(b"PAR1")
    assert "an image of dljob, which has it, or convert the file to CSV" in error(tmp_path / "people.parquet")


@pytest.mark.parametrize("method", ["exists", "iterdir", "open"])
def test_data_that_the_user_of_the_pod_may_not_read_is_an_error(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the pod ended with a traceback, and Kubernetes started it again and again until its deadline."""
    data = tmp_path if method == "iterdir" else people(tmp_path / "people.csv")

    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, method, refuse)
    task = TaskType.IMAGE_CLASSIFICATION if method == "iterdir" else TaskType.TABULAR_CLASSIFICATION
    assert "found" in (text := error(data, task)) and "expected" in text


def test_a_table_becomes_a_model_with_its_reason_and_scripts(tmp_path: Path) -> None:
    suggestion, scripts = asked(people(tmp_path / "people.csv"), target="bought")
    assert suggestion.model is not None and suggestion.model.samples == 48
    assert suggestion.model.name == "linear model" and "60 rows" in suggestion.model.why
    assert len(suggestion.alternatives) == 2 and "60 rows" in suggestion.data[0]
    assert set(scripts) == set(SCRIPTS)
    for name, text in scripts.items():
        compile(text, name, "exec")
    assert Suggestion.parse(suggestion.to_json()) == suggestion


def judge(subject: Subject, limit_s: float) -> Baseline:
    """Act as a baseline whose trees beat its linear model."""
    scores = {"linear model": Score(0.7, 0.02, 0.71), "trees": Score(0.9, 0.01, 0.91)}
    return Baseline("accuracy", scores, test_part="5e1f", other_models={"linear model": 0.71, "trees": 0.91})


def test_the_baseline_chooses_the_model_and_the_script_compares_with_it(tmp_path: Path) -> None:
    question = Question(people(tmp_path / "people.csv"), URI, TaskType.TABULAR_CLASSIFICATION, "bought")
    ticks = itertools.chain([0.0, 1.0, 1.0], itertools.repeat(5.0))
    suggestion, scripts = look(question, NODE, lambda: next(ticks), judge)
    assert suggestion.model is not None and "trees beat a linear model" in suggestion.model.why
    assert suggestion.findings[0].startswith("Trees reach accuracy 0.9 on held-out folds")
    assert suggestion.baseline is not None and suggestion.baseline.seconds == 4.0
    assert [(each.model, each.test) for each in suggestion.baseline.scores] == [("linear model", 0.71), ("trees", 0.91)]
    assert json.loads(scripts[JUDGED]) == {"test_part": "5e1f", "other_models": {"linear model": 0.71, "trees": 0.91}}
    assert Suggestion.parse(suggestion.to_json()) == suggestion


def test_an_undefined_score_is_left_out(tmp_path: Path) -> None:
    question = Question(people(tmp_path / "people.csv"), URI, TaskType.TABULAR_CLASSIFICATION, "bought")
    undefined = Baseline("r2", {"linear model": Score(0.7, 0.02, math.nan)})
    suggestion, _ = look(question, NODE, lambda: 0.0, lambda subject, limit_s: undefined)
    assert suggestion.baseline is not None and suggestion.baseline.scores[0].test is None
    assert Suggestion.parse(suggestion.to_json()) == suggestion


def test_a_failed_baseline_is_one_line_and_the_job_goes_on(tmp_path: Path) -> None:
    suggestion, scripts = asked(people(tmp_path / "people.csv"))
    assert suggestion.model is not None and suggestion.baseline is not None and JUDGED not in scripts
    assert suggestion.baseline.problem == NOT_RUN and not suggestion.baseline.scores
    assert Suggestion.parse(suggestion.to_json()) == suggestion


def test_a_limit_of_time_includes_the_baseline(tmp_path: Path) -> None:
    asked_for: list[float] = []

    def slow(subject: Subject, limit_s: float) -> Baseline:
        asked_for.append(limit_s)
        return judge(subject, limit_s)

    question = Question(people(tmp_path / "people.csv"), URI, TaskType.TABULAR_CLASSIFICATION, "bought", within_s=60.0)
    ticks = itertools.chain([0.0, 4.0, 4.0], itertools.repeat(14.0))
    _, scripts = look(question, NODE, lambda: next(ticks), slow)
    assert asked_for == [15.0]
    assert 'TIME_LIMIT_S") or 46)' in scripts["train.py"]


@pytest.mark.parametrize(("within_s", "raced"), [(3600.0, True), (None, False)])
def test_a_race_comes_with_a_limit_that_has_time_for_it(tmp_path: Path, within_s: float | None, raced: bool) -> None:
    people(tmp_path / "people.csv", 200)
    question = Question(tmp_path / "people.csv", URI, TaskType.TABULAR_CLASSIFICATION, "bought", within_s=within_s)
    suggestion, scripts = look(question, NODE, lambda: 0.0, judge)
    assert suggestion.model is not None
    assert (RACE in scripts) == ("from race import race" in scripts["train.py"]) == raced
    assert ("A race chooses one of 4 settings" in suggestion.model.why) == raced
    assert Suggestion.parse(suggestion.to_json()) == suggestion


@pytest.mark.parametrize(
    ("within_s", "reading_s", "expected"),
    [(None, 500.0, 120.0), (60.0, 4.0, 15.0), (3600.0, 4.0, 120.0), (30.0, 4.0, 2.0)],
)
def test_the_baseline_leaves_time_for_the_training(within_s: float | None, reading_s: float, expected: float) -> None:
    assert baseline_limit_s(within_s, reading_s) == expected


def test_a_baseline_without_time_is_not_started(tmp_path: Path) -> None:
    question = Question(people(tmp_path / "people.csv"), URI, TaskType.TABULAR_CLASSIFICATION, "bought", within_s=18.0)
    suggestion, _ = look(question, NODE, lambda: 0.0, judge)
    assert suggestion.baseline is not None and suggestion.model is not None
    assert "spec.task.within leaves 2 s for the baseline" in (suggestion.baseline.problem or "")


HOSTILE = ("a\nimport os", "b'''", 'c"""', "${imports}", "$batch", "d\\", "e\u2028f = 1", "g\r#")
"""Names of columns that would be code if they were not written as literals."""


@pytest.mark.parametrize("kept", [0, 3])
def test_names_from_the_data_are_only_literals_in_the_scripts(tmp_path: Path, kept: int) -> None:
    """A stranger may have written the data. The job runs the scripts."""

    def written(names: Sequence[str], folder: str) -> list[tuple[str, list[str]]]:
        path = tmp_path / folder / "people.csv"
        path.parent.mkdir()
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(names)
            for i in range(60):  # The last columns are left out, because each row has another text.
                cells = [i * 31 % 17 if place < kept else f"text {i} of {place}" for place in range(len(names) - 2)]
                rows.writerow([i * 37 % 23, *cells, "yes" if i * 37 % 23 > 11 else "no"])
        _, scripts = asked(path, target=names[-1])
        return [(name, statements(text)) for name, text in sorted(scripts.items())]

    def statements(script: str) -> list[str]:
        """Return the code without its literals."""
        kinds = (ast.Constant, ast.Dict, ast.Tuple, ast.List, ast.Set)
        return [
            f"{type(node).__name__} {getattr(node, 'id', '')} {getattr(node, 'attr', '')} {getattr(node, 'name', '')}"
            for node in ast.walk(ast.parse(script)) if not isinstance(node, kinds)
        ]  # fmt: skip

    harmless = [f"column{i}" for i in range(len(HOSTILE))]
    assert written(["x", *HOSTILE], "hostile") == written(["x", *harmless], "harmless")


def test_texts_and_languages_become_models_too(tmp_path: Path) -> None:
    path = tmp_path / "reviews.jsonl"
    words = {"good": "a fine film that I liked", "bad": "a dull film that I left"}
    path.write_text("\n".join(json.dumps({"t": f"{words[c]} {i}", "c": c}) for i in range(30) for c in words))
    suggestion, _ = asked(path, TaskType.TEXT_CLASSIFICATION, target="c", text="t")
    assert suggestion.model is not None and suggestion.model.name.startswith("linear model of words")
    story = tmp_path / "story.txt"
    story.write_text("\n".join(f"Job {i} of {i * i % 997} waited {i * 31 % 613} s for a device." for i in range(500)))
    suggestion, scripts = asked(story, TaskType.LANGUAGE_MODELLING)
    assert suggestion.model is not None and "train.py" in scripts


def test_a_limit_cuts_the_epochs_and_the_script_knows_what_is_left(tmp_path: Path) -> None:
    path = people(tmp_path / "people.csv", 3000)
    ticks = itertools.chain([0.0, 4.0], itertools.repeat(4.0))
    question = Question(path, URI, TaskType.TABULAR_CLASSIFICATION, "bought", within_s=30.0)
    limited, scripts = look(question, NODE, lambda: next(ticks), no_baseline)
    assert limited.model is not None
    assert 'TIME_LIMIT_S") or 26)' in scripts["train.py"]
    assert "spec.task.within: found 3s; expected at least 16s" in error(path, target="bought", within_s=3.0)


@pytest.mark.parametrize(
    ("content", "more", "expected"),
    [
        ("", {}, "found an empty file"),
        ("a\n", {}, "expected"),
        (
            None,
            {"target": "price"},
            "spec.task.target: found 'price'; expected a column of https://data.example/people.csv",
        ),
        (None, {"target": "age", "task": TaskType.TEXT_CLASSIFICATION}, "Set spec.task.text"),
        (None, {"target": "bought", "task": TaskType.TABULAR_REGRESSION}, "spec.task.type: TabularClassification"),
    ],
)
def test_data_that_does_not_fit_is_one_error_in_terms_of_the_spec(
    tmp_path: Path, content: str | None, more: dict[str, Any], expected: str
) -> None:
    path = people(tmp_path / "people.csv")
    if content is not None:
        path.write_text(content)
    assert expected in error(path, **more)


def test_a_table_without_usable_columns_names_the_reason_of_each(tmp_path: Path) -> None:
    """Fixed bug: the reasons of the columns were lost, so the error said nothing about them."""
    path = tmp_path / "people.csv"
    header = [*(f"same{i}" for i in range(9)), "bought"]
    path.write_text("\n".join([",".join(header), *(f"{'1,' * 9}{i % 2}" for i in range(40))]))
    suggestion, _ = asked(path, target="bought")
    assert suggestion.error is not None and "and 4 more" in suggestion.error
    assert "'same0': it has the same value in all rows" in suggestion.error and "same5" not in suggestion.error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "Pass --delimiter if columns differ, such as --delimiter ' '.",
            "Pass --delimiter of dljob suggest if columns differ, such as --delimiter ' ' of dljob suggest.",
            id="value of an option",
        ),
        pytest.param("such as --encoding utf-16-le.", "such as --encoding utf-16-le of dljob suggest.", id="encoding"),
        pytest.param("Pass --keep COLUMN to use", "Pass --keep COLUMN of dljob suggest to use", id="word for a value"),
        pytest.param(
            "or pass --task tabular-regression.", "or set spec.task.type: TabularRegression.", id="field of the spec"
        ),
        pytest.param("column 'text-classification': bad", "column 'text-classification': bad", id="quoted value"),
        pytest.param("/mnt/x: found", "https://a/text-classification/x.csv: found", id="URI"),
        pytest.param("pandas' rows: pass --text COLUMN", "pandas' rows: set spec.task.text", id="apostrophe"),
    ],
)
def test_options_become_fields_and_values_of_users_stay(text: str, expected: str) -> None:
    """Fixed bug: words came between an option and its value, and names of columns and URIs were changed."""
    question = Question(Path("/mnt/x"), "https://a/text-classification/x.csv?token=1", TaskType.TEXT_CLASSIFICATION)
    assert in_terms_of_the_spec(text, question) == expected


def test_missing_data_and_data_of_another_form_are_errors(tmp_path: Path) -> None:
    assert "spec.dataset.uri: found no file or folder" in error(tmp_path / "none.csv")
    (tmp_path / "x.npz").write_bytes(b"")
    assert "set spec.task.type: ImageClassification" in error(tmp_path / "x.npz")
    (tmp_path / "folder").mkdir()
    assert "Name one file" in error(tmp_path / "folder")
    assert "holds no table and no text" in error(tmp_path / "folder", TaskType.TEXT_CLASSIFICATION)


@pytest.mark.parametrize("task", [TaskType.TEXT_CLASSIFICATION, TaskType.LANGUAGE_MODELLING])
def test_both_parts_of_a_folder_of_texts_are_read_where_the_job_finds_them(
    task: TaskType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: ``train`` and ``test`` became the classes, and the test part was looked for beside the folder."""
    _, scripts = asked(class_files(test=True, extra="and so on " * 40)(tmp_path / "data"), task)
    monkeypatch.setenv("DLJOB_DATASET", str((tmp_path / "data").rename(tmp_path / "mounted")))
    lines = scripts["train.py"].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("DATA, TEST_DATA = "))
    found: dict[str, Any] = {"os": os, "Path": Path}
    exec("\n".join([scripts["data.py"], *lines[first : first + 4]]), found)
    parts = found["parts"](found["DATA"], 0, found["TEST_DATA"])
    assert [len(part) for part in parts] == ([40] * 4 if len(parts) == 4 else [40] * 2)
    assert len(parts) == 2 or set(parts[1]) == {"sport", "money"}


def test_texts_from_the_data_have_no_control_characters(tmp_path: Path) -> None:
    path = people(tmp_path / "people.csv")
    path.write_text(path.read_text().replace("age", "a\x1b[31mge", 1))
    assert "\x1b" not in error(path, target="price")


def test_the_program_writes_to_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = people(tmp_path / "people.csv"), tmp_path / "out"
    given = [str(path), "--type", "TabularClassification", "--target", "bought", "--to", str(folder)]
    assert program.main(given) == 0
    assert {each.name for each in folder.iterdir()} == {*SCRIPTS, JUDGED, SUGGESTION_KEY}
    assert "linear model" in capsys.readouterr().out
    suggestion = Suggestion.parse((folder / SUGGESTION_KEY).read_text())
    assert suggestion.baseline is not None and suggestion.baseline.problem is None
    judged = json.loads((folder / JUDGED).read_text())
    assert set(judged["other_models"]) == {"linear model", "trees"}
    assert judged["other_models"]["trees"] == suggestion.baseline.scores[1].test > 0.8


def test_the_program_stores_a_config_map_and_removes_scripts_of_an_earlier_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches: list[Any] = []

    class Api:
        async def merge(self, kind: Any, namespace: str, name: str, patch: Any) -> None:
            patches.append((kind.plural, namespace, name, patch))

    def reach(work: Any) -> None:
        with contextlib.suppress(StopIteration):
            work(Api()).send(None)

    monkeypatch.setattr(program.remote, "reach", reach)
    given = [str(tmp_path / "none.csv"), "--type", "TabularRegression", "--namespace", "a", "--config-map", "b"]
    assert program.main([*given, "--uid", "u", "--digest", "c" * 32]) == 0
    ((kind, namespace, name, patch),) = patches
    assert (kind, namespace, name) == ("configmaps", "a", "b")
    assert patch["data"]["train.py"] is patch["data"][JUDGED] is None
    assert Suggestion.parse(patch["data"][SUGGESTION_KEY]).digest == "c" * 32
