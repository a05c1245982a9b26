"""What two jobs must share to cost the same (the key of a DLProfile), and to train on the same data."""

import hashlib
import json

from dljob.api import DLJobSpec
from dljob.perf.workload.models import MODELS


def profile_key(spec: DLJobSpec) -> str:
    """Model part of the DLProfile's key: what makes two jobs cost the same per sample.

    A built-in model's name, with the dataset unless it is the one that the model is made for (its samples' shape sets
    the cost); else a digest of the user's program.
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
    """What makes two jobs of a model train on the same data, and so with the same noise in their gradients."""
    if spec.dataset.name is not None:
        return spec.dataset.name.value
    return f"data-{hashlib.sha256(str(spec.dataset.uri).encode()).hexdigest()[:8]}"
