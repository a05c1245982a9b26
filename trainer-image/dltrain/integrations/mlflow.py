"""Export a run report to MLflow: ``python -m dltrain.integrations.mlflow report.json FOLDER``.

FOLDER gets MLflow's file store. A tracking URI such as http://mlflow:5000 or sqlite:///mlflow.db may take its place.
The export needs the package ``mlflow``; for a folder and for a server, ``mlflow-skinny`` is enough.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlcontract import RunPhase
from dltrain.integrations.exported_report import ExportError, curves, run, settings
from dltrain.record.run_report.document import Document

EXPERIMENT = "dljob"
"""Name of the experiment, unless the variable MLFLOW_EXPERIMENT_NAME names another."""
UID = "dljob.uid"
"""Tag with the UID of the job. A second export of the same job replaces the run of the first."""
BATCH = 1000
"""Most metrics in one request, a limit of MLflow."""
_STATUS = {RunPhase.SUCCEEDED: "FINISHED", RunPhase.FAILED: "FAILED", RunPhase.STOPPED: "KILLED"}


def export(document: Document, path: Path, client: Any, experiment: str = EXPERIMENT) -> str:
    """Write the run report ``document`` to the tracking store of ``client`` as one run. Return the id of the run.

    The run has the curves, the settings as parameters, the totals and findings as tags, and report.json at ``path`` as
    an artifact. ``client``: an ``MlflowClient``.
    """
    from mlflow.entities import Metric, Param, RunTag

    found = client.get_experiment_by_name(experiment)
    number = client.create_experiment(experiment) if found is None else found.experiment_id
    for former in client.search_runs([number], f"tags.`{UID}` = '{document.uid}'"):
        client.delete_run(former.info.run_id)
    started = client.create_run(number, start_time=_ms(document.started_unix_s), run_name=document.job)
    name: str = started.info.run_id
    tags = {UID: document.uid, "dljob.phase": document.phase.value} | {
        f"dljob.finding.{finding.name}": finding.message for finding in document.findings
    }
    params = [Param(key, str(value)) for key, value in settings(document).items()]
    client.log_batch(name, params=params, tags=[RunTag(key, value) for key, value in tags.items()])
    metrics = [Metric(key, value, _ms(unix_s), step) for key, value, step, unix_s in curves(document)]
    for batch in _batches(metrics):
        client.log_batch(name, metrics=batch)
    client.log_artifact(name, str(path))
    if (status := _STATUS.get(document.phase)) is not None:
        client.set_terminated(name, status, _ms(document.updated_unix_s))
    return name


def main(arguments: list[str]) -> int:
    """Export a run report to MLflow. Return the exit code of the process.

    ``arguments``: the path of report.json, and a folder or a tracking URI. The exit code is 0, or 2 for wrong
    arguments, an invalid report, a missing package, or a store that refuses the run.
    """
    return run(arguments, "mlflow", "FOLDER|URI", _write)


def _write(path: Path, document: Document, target: str) -> None:
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    uri = target if "://" in target else Path(target).resolve().as_uri()
    try:
        found = export(document, path, MlflowClient(uri), os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT)
    except (MlflowException, OSError) as error:
        text = f"mlflow: found {target} ({error}); expected a folder or the URI of a tracking store"
        raise ExportError(text) from error
    print(f"run {found} in {uri}")  # noqa: T201


def _ms(unix_s: float) -> int:
    return round(1000 * unix_s)


def _batches(metrics: Sequence[Any]) -> list[Sequence[Any]]:
    return [metrics[at : at + BATCH] for at in range(0, len(metrics), BATCH)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
