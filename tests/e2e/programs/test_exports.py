"""Tests of the exports of a run report with the real TensorBoard, MLflow and W&B. They read the written files back.

They need no cluster. ``tests/trainer/reporting`` tests the exports with recorders in place of the packages.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlcontract import RunPhase
from dltrain.protocol.rank_messages import Evaluated, Logged, Step
from dltrain.record.run_report.document import Document, Finding
from dltrain.record.run_report.history import History
from support.cluster.kubectl import ROOT
from support.cluster.program_image import export_libraries
from support.trainer.plans import make_plan
from support.trainer.ranks import environment

pytestmark = pytest.mark.programs

CURVES = {
    "run/loss": [[2, 7.0, 0.5], [4, 9.0, 0.25]],
    "run/step_s": [[2, 7.0, 0.25], [4, 9.0, 0.5]],
    "evaluation/accuracy": [[4, 9.0, 0.75]],
    "logged/val/loss": [[4, 9.0, 1.5]],
}
"""Name → step, Unix time in seconds and value of each point. All are exact in float32, which TensorBoard stores."""
READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1])
found.Reload()
print(json.dumps({tag: [(e.step, e.wall_time, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}))
"""
READ_MLFLOW = """
import json, os, sys
from pathlib import Path
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow import MlflowClient
client = MlflowClient(Path(sys.argv[1]).resolve().as_uri())
[run] = client.search_runs([client.get_experiment_by_name("dljob").experiment_id])
histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
print(json.dumps({
    "curves": {name: [(m.step, m.timestamp / 1000, m.value) for m in points] for name, points in histories.items()},
    "params": run.data.params, "tags": run.data.tags, "status": run.info.status, "name": run.info.run_name,
    "files": [each.path for each in client.list_artifacts(run.info.run_id)],
}))
"""
# The package has no function that reads the file: a log of LevelDB, after 7 bytes of W&B.
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def messages(data, block=32768):
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole message, or the last part of one
            yield whole
            whole = b""

def values(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

found = {"history": [], "summary": {}, "config": {}}
for data in messages(Path(sys.argv[1]).read_bytes()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    match record.WhichOneof("record_type"):
        case "history":
            found["history"].append(values(record.history.item))
        case "summary":
            found["summary"] |= values(record.summary.update)
        case "run":
            found |= {"id": record.run.run_id, "name": record.run.display_name, "project": record.run.project}
            found["config"] |= values(record.run.config.update)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def libraries() -> Path:
    return export_libraries()


@pytest.fixture
def document() -> Document:
    plan = make_plan()
    history = History(plan, 1.0)
    history.begin_attempt(plan, plan, 1.0)
    more = {"rank": 0, "steps": 9, "samples_per_s": 480, "world_size": 1, "reported": True}
    first, last = Step(step=2, loss=0.5, step_s=0.25, **more), Step(step=4, loss=0.25, step_s=0.5, **more)
    history.record(first, 0, 7.0)
    for message in (last, Evaluated(rank=0, step=4, accuracy=0.75), Logged(rank=0, step=4, values={"val/loss": 1.5})):
        history.record(message, 0, 9.0)
    found = history.document(RunPhase.SUCCEEDED, 1, 10.0)
    return found.model_copy(update={"findings": (Finding(name="Overfitting", message="the loss rises"),)})


def run(libraries: Path, *arguments: str | Path) -> str:
    """Run a Python process with the packages of the exports. Return its standard output."""
    env = environment(WANDB_SILENT="true", GIT_PYTHON_REFRESH="quiet")
    env["PYTHONPATH"] += f"{os.pathsep}{libraries}"
    command = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=env, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def exported(libraries: Path, package: str, document: Document, folder: Path) -> Path:
    """Export the report with a command of dltrain. Return the folder with the result."""
    report = folder / "report.json"
    report.write_text(document.to_json())
    run(libraries, "-m", f"dltrain.integrations.{package}", report, folder / "runs")
    return folder / "runs"


def found(libraries: Path, reader: str, path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(libraries, "-c", reader, path).splitlines()[-1])
    return answer


def test_tensorboard_reads_the_curves(libraries: Path, document: Document, tmp_path: Path) -> None:
    folder = exported(libraries, "tensorboard", document, tmp_path)
    curves = found(libraries, READ_TENSORBOARD, folder)
    assert {name: curves[name] for name in CURVES} == CURVES


def test_mlflow_reads_one_run_for_each_job(libraries: Path, document: Document, tmp_path: Path) -> None:
    exported(libraries, "mlflow", document, tmp_path)
    folder = exported(libraries, "mlflow", document, tmp_path)  # The second export replaces the first.
    run = found(libraries, READ_MLFLOW, folder)
    assert {name: run["curves"][name] for name in CURVES} == CURVES
    assert (run["name"], run["status"], run["files"]) == (document.job, "FINISHED", ["report.json"])
    assert run["params"]["global_batch"] == str(document.global_batch)
    assert run["tags"]["dljob.uid"] == document.uid and run["tags"]["dljob.finding.Overfitting"] == "the loss rises"


def test_wandb_reads_the_offline_run(libraries: Path, document: Document, tmp_path: Path) -> None:
    folder = exported(libraries, "wandb", document, tmp_path)
    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    run = found(libraries, READ_WANDB, path)
    first, last = run["history"]
    assert (first["_step"], first["run/loss"], first["_timestamp"]) == (2, 0.5, 7.0)
    assert (last["_step"], last["run/loss"], last["_timestamp"]) == (4, 0.25, 9.0)
    assert (last["evaluation/accuracy"], last["logged/val/loss"]) == (0.75, 1.5)
    assert (run["id"], run["name"], run["project"]) == (document.uid, document.job, "dljob")
    assert run["config"]["global_batch"] == document.global_batch
    assert run["summary"]["phase"] == "Succeeded" and run["summary"]["finding/Overfitting"] == "the loss rises"
    assert (path.parent / "files/report.json").read_text() == document.to_json()
