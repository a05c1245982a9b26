"""Tests of the export of a run report to MLflow and W&B. Recorders stand in for the packages."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dlcontract import RunPhase
from dltrain.integrations import mlflow, wandb
from dltrain.protocol.rank_messages import Evaluated, Logged, Step
from dltrain.record.run_report.document import Document
from dltrain.record.run_report.history import History
from support.trainer.plans import make_plan


@pytest.fixture
def document() -> Document:
    plan = make_plan()
    history = History(plan, 1.0)
    history.begin_attempt(plan, plan, 1.0)
    step = Step(rank=0, step=2, steps=9, loss=0.5, step_s=0.25, samples_per_s=480, world_size=1, reported=True)
    for message in (step, Evaluated(rank=0, step=2, accuracy=0.75), Logged(rank=0, step=2, values={"val/loss": 1.5})):
        history.record(message, 0, 7.0)
    return history.document(RunPhase.SUCCEEDED, 1, 8.0)


class Store:
    """A stand-in for ``MlflowClient``, with one experiment."""

    def __init__(self) -> None:
        self.experiments: list[str] = []
        self.runs: dict[str, SimpleNamespace] = {}

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return name

    def search_runs(self, _: list[str], filter_string: str) -> list[SimpleNamespace]:
        uid = filter_string.split("'")[1]
        return [run for run in self.runs.values() if ("dljob.uid", uid) in run.tags]

    def delete_run(self, run_id: str) -> None:
        del self.runs[run_id]

    def create_run(self, experiment_id: str, start_time: int, run_name: str) -> SimpleNamespace:
        info = SimpleNamespace(run_id=f"run-{start_time}-{len(self.runs)}")
        run = SimpleNamespace(info=info, name=run_name, of=experiment_id, metrics=[], params=[], tags=[], files=[])
        self.runs[info.run_id] = run
        return run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        run = self.runs[run_id]
        run.metrics += metrics
        run.params += params
        run.tags += tags

    def log_artifact(self, run_id: str, path: str) -> None:
        self.runs[run_id].files.append(path)

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        self.runs[run_id].ended = (status, end_time)


def test_mlflow_gets_one_run_for_each_job(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    entities = ModuleType("mlflow.entities")
    entities.Metric = entities.Param = entities.RunTag = lambda *values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    store = Store()
    mlflow.export(document, Path("report.json"), store)
    name = mlflow.export(document, Path("report.json"), store)
    assert list(store.runs) == [name] and store.experiments == ["dljob"], "the second export replaces the first"
    run = store.runs[name]
    assert run.name == document.job and run.ended == ("FINISHED", 8000) and run.files == ["report.json"]
    assert ("run/loss", 0.5, 7000, 2) in run.metrics and ("logged/val/loss", 1.5, 7000, 2) in run.metrics
    assert ("evaluation/accuracy", 0.75, 7000, 2) in run.metrics
    assert ("global_batch", str(document.global_batch)) in run.params and ("dljob.phase", "Succeeded") in run.tags


def test_wandb_gets_the_values_of_a_step_together(document: Document) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    run = SimpleNamespace(summary={}, log=lambda values, step: logged.append((step, values)))
    wandb.export(document, run)
    [(step, values)] = logged
    assert step == 2 and values["run/loss"] == 0.5 and values["logged/val/loss"] == 1.5
    assert values["evaluation/accuracy"] == 0.75 and values["_timestamp"] == 7.0 and run.summary["phase"] == "Succeeded"


@pytest.mark.parametrize("module", [mlflow, wandb])
def test_missing_package_is_named_with_the_remedy(
    module: ModuleType, document: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = module.__name__.rpartition(".")[2]
    report = tmp_path / "report.json"
    report.write_text(document.to_json())
    assert module.main([str(report), str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == (
        f"{package}: found no such package; expected it beside dltrain. Install it: pip install {package}\n"
    )
    assert module.main([]) == 2 and "usage: python -m dltrain.integrations" in capsys.readouterr().err
    report.write_text("{}")
    assert module.main([str(report), str(tmp_path)]) == 2 and f"found {report}" in capsys.readouterr().err
