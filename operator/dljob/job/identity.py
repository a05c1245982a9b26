"""Keys that identify the model and the training data of a job, so that jobs can use measurements of earlier jobs."""

import hashlib
import json
import re
from typing import Any

from dljob.api import DLJobSpec
from dljob.api.spec.source import Source
from dljob.perf.workload.models import MODELS

IMAGE_PREFIX = "image-"


def profile_key(spec: DLJobSpec) -> str:
    """Return the key of the job's model, which together with a device type identifies a DLProfile (measured constants).

    Jobs with equal keys have the same compute time per sample on the same device, and so share measurements.

    For a built-in model, the key is the model's name. The dataset is added if it is not the model's default, because
    the compute time depends on the dimensions of a sample. The image is added if it is not the operator's, because
    another image may run other code under the same name. For a training script, the key is a digest of the image, the
    command, its arguments, ``spec.model``, which describes the script's model to the planner, and the origin of its
    files.
    """
    if spec.trainer.command:
        program: list[Any] = [spec.trainer.image, spec.trainer.command, spec.trainer.args, spec.model.manifest()]
        if spec.trainer.source is not None:  # Other keys stay those of earlier releases.
            program.append(_origin(spec.trainer.source))
        return f"program-{hashlib.sha256(json.dumps(program).encode()).hexdigest()[:12]}"
    assert spec.model.name is not None, "a rule of the API requires a command with hints"
    parts = [spec.model.name.value]
    if spec.dataset.name is None:
        parts.append(f"data-{hashlib.sha256(str(spec.dataset.uri).encode()).hexdigest()[:8]}")
    elif spec.dataset.name.value != MODELS[parts[0]][1]:
        parts.append(spec.dataset.name.value)
    if spec.trainer.image:
        parts.append(f"{IMAGE_PREFIX}{hashlib.sha256(spec.trainer.image.encode()).hexdigest()[:8]}")
    return ".".join(parts)


def data_key(spec: DLJobSpec) -> str:
    """Return the key of the training data: the name of a built-in dataset, or a digest of the dataset's URI.

    Jobs with equal models and equal keys have the same gradient noise scale, so they share measurements of it.
    """
    if spec.dataset.name is not None:
        return spec.dataset.name.value
    return f"data-{hashlib.sha256(str(spec.dataset.uri).encode()).hexdigest()[:8]}"


def _origin(source: Source) -> list[str | None]:
    """Return what identifies a script among scripts with equal commands: the place of its files, without a revision.

    A new commit rarely changes the compute time, so that jobs with another commit use the same measurements.
    """
    if source.git is not None:
        return ["git", source.git.url, source.git.path]
    if source.archive is not None:
        return ["archive", source.archive.uri.partition("?")[0], source.archive.path]
    assert source.config_map is not None, "a rule of the API requires one of the three"
    return ["configMap", source.config_map.name]


def profile_name(model: str, device: str, namespace: str | None = None) -> str:
    """Return the name of the DLProfile of a model key and a device type: both in readable form, and a digest.

    ``namespace``: the only namespace whose plans use the profile; None: all namespaces share it. The digest includes
    it.
    """
    origin = f"{model}\n{device}" + (f"\n{namespace}" if namespace else "")
    digest = hashlib.sha256(origin.encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-z0-9]+", "-", f"{model}-{device}".lower()).strip("-")[:48].strip("-")
    return f"{readable}-{digest}"
