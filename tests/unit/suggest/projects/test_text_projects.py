"""The written projects for documents: each model that is named has the size that is predicted, trains and predicts."""

import json
from pathlib import Path

import pytest
import yaml

from dljob.job.plan.recommendation import parse_job
from dljob.suggest.subject import Options, Subject, read_subject
from dljob.suggest.trial import write
from support.generated_data import Case, texts
from support.projects import analysis, metrics, script, shorten

MAX_LINES = 150
CALLS = ("dltrain.init(", "t.wrap(", "t.loader(", "t.steps(", "t.log(", "dltrain.evaluate(")
CASES = {case.name: case for case in texts()}
DOCUMENTS, LANGUAGE = "texts in JSON Lines", "a text file"
COUNT = {
    DOCUMENTS: "p = data.Preprocessing.fit(*data.parts(PATH, 0)[:2])\n"
    "n = model.Network(len(p.weights), len(p.state['classes']))\n",
    LANGUAGE: "n = model.Network()\n",
}
ALTERNATIVES = [
    pytest.param(name, i, marks=[pytest.mark.long] if i else []) for name in (DOCUMENTS, LANGUAGE) for i in range(3)
]


def subject(case: Case, folder: Path) -> Subject:
    folder.mkdir()
    return read_subject(Options(case.write(folder)))


@pytest.mark.parametrize("name", [DOCUMENTS, LANGUAGE, "folders of texts", "a folder of texts without classes"])
def test_scripts_are_short_and_complete(name: str, tmp_path: Path) -> None:
    found = subject(CASES[name], tmp_path / "data")
    for settings in found.models(None):
        files = found.project(settings, None)
        for script_name, text in files.items():
            if script_name.endswith(".py"):
                compile(text, script_name, "exec")
                assert len(text.splitlines()) <= MAX_LINES, script_name
                assert "$" not in text, script_name
        assert all(call in files["train.py"] for call in CALLS)
        scripts, job = yaml.safe_load_all(files["job.yaml"])
        assert parse_job(job).spec.model.given
        assert all(files[name] == text for name, text in scripts["data"].items())


@pytest.mark.parametrize(("name", "alternative"), ALTERNATIVES)
def test_hints_are_the_size_of_the_model(name: str, alternative: int, tmp_path: Path) -> None:
    found = subject(CASES[name], tmp_path / "data")
    settings = found.models(None)[alternative]
    write(tmp_path / "project", found, settings, None)
    code = COUNT[name].replace("PATH", repr(str(found.source.data)))
    code = f"import data, model\n{code}print(sum(q.numel() for q in n.parameters()))\n"
    (tmp_path / "project" / "count.py").write_text(code, encoding="utf-8")
    assert settings.parameters == pytest.approx(int(script(tmp_path / "project", "count.py")), rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize(("name", "alternative"), ALTERNATIVES)
def test_model_trains_and_predicts(name: str, alternative: int, tmp_path: Path) -> None:
    found, project = subject(CASES[name], tmp_path / "data"), tmp_path / "project"
    write(project, found, found.models(None)[alternative], None)
    shorten(project, 1 if name == LANGUAGE else 8)
    baseline = json.loads(script(project, "baseline.py"))["scores"]
    script(project, "train.py", TIME_LIMIT_S="60")
    report = analysis(project)
    others = {each["name"]: each["value"] for each in report["other_models"]}
    if name == LANGUAGE:
        assert others == pytest.approx({name: 2 ** score["test"] for name, score in baseline.items()})
        assert (report["bits_per_token"], report["vocabulary"]) == (metrics(project)["bits_per_byte"], 256)
        assert metrics(project)["bits_per_byte"] < 5
        assert script(project, "predict.py", "def ", "--bytes", "20").startswith("def ")
    else:
        assert others == pytest.approx({name: score["test"] for name, score in baseline.items()})
        assert metrics(project)["accuracy"] == report["accuracy"] > 0.5
        wrong = json.loads((project / "model" / "most_wrong.json").read_text(encoding="utf-8"))
        assert len(wrong) == len(report["wrong"]) and all(each["text"] for each in wrong)
        lines = script(project, "predict.py", "the team and the coach win a match", "a bank").splitlines()
        assert len(lines) == 3
        lines = script(project, "baseline.py", "--predict", "the team and the coach win a match", "a bank").splitlines()
        assert len(lines) == 3 and lines[0] == "class,text"
