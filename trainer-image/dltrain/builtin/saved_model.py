"""Write `model.json` and `predict.py` beside a built-in model's checkpoints, with which others can use the model."""

import json
import logging
from pathlib import Path

from dlcontract import Plan
from dltrain.checkpoint.job_files import JobFiles
from dltrain.data.datasets import Dataset
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.volume_layout import checkpoint_place

log = logging.getLogger(__name__)

ABOUT, SCRIPT = "model.json", "predict.py"


def write(plan: Plan, data: Dataset) -> None:
    """Write ``model.json`` and ``predict.py`` beside the job's checkpoints, if the plan has checkpoints.

    Call it before the training, so that a job that ends early has them, too. An error is only logged, so that the
    training continues.
    """
    if not plan.checkpoint.enabled:
        return
    try:
        files = JobFiles(plan)
        files.write(ABOUT, json.dumps(about(plan, data), indent=1).encode())
        files.write(SCRIPT, Path(__file__).with_name(SCRIPT).read_bytes())
    except (OSError, BadInputError) as error:  # The first checkpoint reports the error, if it persists.
        log.warning(
            "cannot write model.json and predict.py to %s (%s); the training continues without them",
            checkpoint_place(plan), error,
        )  # fmt: skip


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
