"""Write what others need to use a built-in model beside its checkpoints: ``model.json`` and ``predict.py``."""

import json
import logging
import os
from pathlib import Path

from dlcontract import Plan
from dltrain.data.datasets import Dataset
from dltrain.protocol.volume_layout import job_directory

log = logging.getLogger(__name__)

ABOUT, SCRIPT = "model.json", "predict.py"


def write(plan: Plan, data: Dataset) -> None:
    """Write both files to the folder of the job's checkpoints, if the plan has checkpoints.

    Call it before the training, so that a job that ends early has them, too. An error is only logged: the training is
    worth more.
    """
    if not plan.checkpoint.enabled:
        return
    folder = job_directory(plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / ABOUT, json.dumps(about(plan, data), indent=1))
        _write(folder / SCRIPT, Path(__file__).with_name(SCRIPT).read_text(encoding="utf-8"))
    except OSError as error:
        log.warning("cannot write %s and %s to %s: %s", ABOUT, SCRIPT, folder, error)


def about(plan: Plan, data: Dataset) -> dict[str, object]:
    """Return the content of ``model.json``: the model's name, its inputs and its classes.

    ``scale``: the factor by which inputs of type uint8 are multiplied; null: none.
    """
    return {
        "schema": 1,
        "model": plan.model.name,
        "dataset": plan.dataset.name or plan.dataset.path,
        "shape": list(data.shape.shape),
        "classes": data.shape.classes,
        "tokens": data.shape.tokens,
        "labels": list(data.labels),
        "scale": data.scale,
    }


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
