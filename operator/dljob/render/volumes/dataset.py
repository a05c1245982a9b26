"""The dataset in the pod: its volume, and the init container that fetches and verifies it."""

from collections.abc import Sequence

from dlcontract import DATASET_DIR, DATASET_SECRET_DIR
from dljob.api import DLJobSpec
from dljob.api.spec.dataset import DEFAULT_SIZE
from dljob.cluster import quantity
from dljob.job.observed import DATASET_CONTAINER
from dljob.render.config import Manifest

SECRET_VOLUME = "dataset-secret"
_COMMAND = ("python", "-m", "dltrain.data.fetch")


def volume(spec: DLJobSpec) -> list[Manifest]:
    """Return a list with the volume ``dataset``, or an empty list if the job needs no volume for its data.

    The volume is the claim that the spec names, or else an ``emptyDir`` on the node's disk for data to fetch. If ranks
    fetch shards, a volume with the credentials follows.
    """
    data = spec.dataset
    if data.sharded:
        secret = {"secretName": data.secret_name, "defaultMode": 0o440}
        secrets: list[Manifest] = [{"name": SECRET_VOLUME, "secret": secret}] if data.secret_name else []
        return [{"name": "dataset", "emptyDir": {"sizeLimit": data.size}}, *secrets]
    if data.claim:
        claim = {"claimName": data.claim} if data.remote else {"claimName": data.claim, "readOnly": True}
        return [{"name": "dataset", "persistentVolumeClaim": claim}]
    return [{"name": "dataset", "emptyDir": {"sizeLimit": data.size or DEFAULT_SIZE}}] if data.remote else []


def mount(spec: DLJobSpec, *, writable: bool = False) -> list[Manifest]:
    if not volume(spec):
        return []
    if spec.dataset.sharded:
        found: list[Manifest] = [{"name": "dataset", "mountPath": DATASET_DIR}]
        if spec.dataset.secret_name:
            # Files rather than environment variables, as for checkpoints: scripts keep their own AWS_… variables.
            found.append({"name": SECRET_VOLUME, "mountPath": DATASET_SECRET_DIR, "readOnly": True})
        return found
    return [{"name": "dataset", "mountPath": DATASET_DIR, **({} if writable else {"readOnly": True})}]


def fetched_first(spec: DLJobSpec) -> bool:
    """Return True if an init container fetches or verifies the data. Ranks fetch shards themselves."""
    return (spec.dataset.remote or spec.dataset.checked) and not spec.dataset.sharded


def init_container(spec: DLJobSpec, image: Manifest, environment: Sequence[Manifest], security: Manifest) -> Manifest:
    """Return the init container that fetches data and verifies checksums.

    ``image``: the container's fields ``image`` and ``imagePullPolicy``. ``environment``: its environment variables.
    ``security``: its ``securityContext``.
    """
    data = spec.dataset
    arguments = [data.uri, "--to", data.file] if data.remote else [f"file://{data.file}"]
    if data.sha256:
        arguments += ["--sha256", data.sha256]
    requests = {"cpu": "100m", "memory": "256Mi"}
    if data.remote and not data.cache_claim_name:
        size = data.size or DEFAULT_SIZE
        arguments += ["--room", str(int(quantity(size)))]
        requests["ephemeral-storage"] = size
    secret = {"envFrom": [{"secretRef": {"name": data.secret_name}}]} if data.secret_name else {}
    return {
        "name": DATASET_CONTAINER,
        **image,
        "command": [*_COMMAND, *arguments],
        **secret,
        "env": list(environment),
        "resources": {"requests": requests, "limits": {"memory": "512Mi"}},
        "securityContext": security,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mount(spec, writable=data.remote)],
        # The last log line of this container names the error. The kubelet copies that line to the pod's status, from
        # which the operator copies it to the job's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
