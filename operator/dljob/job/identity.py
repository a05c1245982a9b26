"""Keys that identify the model and the training data of a job, so that jobs can use measurements of earlier jobs."""

import hashlib
import json

from dljob.api import DLJobSpec
from dljob.perf.workload.models import MODELS


def profile_key(spec: DLJobSpec) -> str:
    """Return the model part of the DLProfile's key. Jobs with equal keys cost the same per sample.

    For a built-in model, the key is the model's name. If the dataset is not the model's default, the dataset is added,
    because the shape of samples determines the cost. For a training script, the key is a digest of its image, command,
    arguments and ``spec.model``.
    """
    if spec.trainer.command:
        program = [spec.trainer.image, spec.trainer.command, spec.trainer.args, spec.model.manifest()]
        return f"program-{hashlib.sha256(json.dumps(program).encode()).hexdigest()[:12]}"
    assert spec.model.name is not None, "a rule of the API requires a command with hints"
    name = spec.model.name.value
    if spec.dataset.name is not None:
        return name if spec.dataset.name.value == MODELS[name][1] else f"{name}.{spec.dataset.name.value}"
    return f"{name}.data-{hashlib.sha256(str(spec.dataset.uri).encode()).hexdigest()[:8]}"


def data_key(spec: DLJobSpec) -> str:
    """Return the key of the training data. Jobs with equal models and equal keys have the same gradient noise scale."""
    if spec.dataset.name is not None:
        return spec.dataset.name.value
    return f"data-{hashlib.sha256(str(spec.dataset.uri).encode()).hexdigest()[:8]}"
