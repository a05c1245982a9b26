"""The files of ``spec.trainer.source`` in the pod: their volume, the init container that fills it, and where they are.

The init container runs the operator's trainer image, so that the files reach any image. It copies the keys of a
ConfigMap too, because a mounted ConfigMap would change below a running script.
"""

from collections.abc import Sequence
from posixpath import dirname

from dlcontract import IMAGE_AGENT, SOURCE_DIR, SOURCE_FILES_DIR, SOURCE_INPUT_DIR
from dljob.api import DLJobSpec
from dljob.api.spec.source import Source
from dljob.job.observed import SOURCE_CONTAINER
from dljob.render import agent
from dljob.render.config import Manifest, RenderConfig

SIZE = "2Gi"
"""Size limit of the volume: room for an archive or a pack file and its files, at most 1 GiB each."""
_INPUT = "source-input"
_COMMAND = (f"{dirname(IMAGE_AGENT)}/python", "-I", "-m", "dltrain.source.fetch")


def volumes(spec: DLJobSpec) -> list[Manifest]:
    """Return the volume for the files and the one they come from, or an empty list without ``trainer.source``."""
    source = spec.trainer.source
    if source is None:
        return []
    found: list[Manifest] = [{"name": SOURCE_CONTAINER, "emptyDir": {"sizeLimit": SIZE}}]
    if source.config_map is not None:
        # Optional, because the kubelet would otherwise report a missing ConfigMap only in an event, not in a status.
        found.append({"name": _INPUT, "configMap": {"name": source.config_map.name, "optional": True}})
    elif source.archive is not None and source.archive.claim is not None:
        claim = {"claimName": source.archive.claim, "readOnly": True}
        found.append({"name": _INPUT, "persistentVolumeClaim": claim})
    return found


def mount(spec: DLJobSpec) -> list[Manifest]:
    if spec.trainer.source is None:
        return []
    return [{"name": SOURCE_CONTAINER, "mountPath": SOURCE_DIR, "readOnly": True}]


def working_directory(spec: DLJobSpec) -> str | None:
    """Return the working directory of the trainer container; None: the one of the image."""
    source = spec.trainer.source
    if source is None:
        return None
    return f"{SOURCE_FILES_DIR}/{source.path}" if source.path else SOURCE_FILES_DIR


def init_container(
    spec: DLJobSpec, config: RenderConfig, environment: Sequence[Manifest], security: Manifest
) -> list[Manifest]:
    """Return a list with the init container that fetches the files, or an empty list without ``trainer.source``.

    ``environment``: its environment variables, such as those of a proxy. ``security``: its ``securityContext``.
    """
    source = spec.trainer.source
    if source is None:
        return []
    secret = {"envFrom": [{"secretRef": {"name": source.secret[1]}}]} if source.secret is not None else {}
    mounts: list[Manifest] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": SOURCE_CONTAINER, "mountPath": SOURCE_DIR}]
    if any(item["name"] == _INPUT for item in volumes(spec)):
        mounts.append({"name": _INPUT, "mountPath": SOURCE_INPUT_DIR, "readOnly": True})
    container = {
        "name": SOURCE_CONTAINER,
        **agent.trainer_image(config),
        "command": [*_COMMAND, *_arguments(source)],
        **secret,
        "env": list(environment),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": security,
        "volumeMounts": mounts,
        # As for the dataset: the last log line names the error, and reaches the job's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return [container]


def _arguments(source: Source) -> list[str]:
    path = [f"--path={source.path}"] if source.path else []
    if source.git is not None:
        return ["git", source.git.url, source.git.revision, *path]
    if source.archive is not None:
        archive = source.archive
        below = archive.uri.removeprefix(f"pvc://{archive.claim}/")
        uri = archive.uri if archive.claim is None else f"file://{SOURCE_INPUT_DIR}/{below}"
        return ["archive", uri, *((f"--sha256={archive.sha256}",) if archive.sha256 else ()), *path]
    assert source.config_map is not None, "a rule of the API requires one of the three"
    return ["config-map", source.config_map.name]
