"""Apply the manifest of one DLJob to the cluster, after the checks that need no change."""

from collections.abc import Mapping
from typing import Any

from dljob.client import files, update_check
from dljob.client.access import FIELD_OWNER
from dljob.client.errors import BadInputError, RefusedChangeError

Manifest = Mapping[str, Any]


def only_job(path: str) -> Manifest:
    """Return the manifest of the only DLJob in a file of YAML or JSON documents.

    ``path``: path of the file, or ``-`` for standard input. Raise BadInputError if the file has other objects. The
    manifest is not validated.
    """
    bodies = files.manifests(path)
    wanted = [b for b in bodies if isinstance(b, Mapping) and b.get("kind") == "DLJob"]
    others = sorted({str(b.get("kind")) if isinstance(b, Mapping) else repr(b)[:40] for b in bodies if b not in wanted})
    if len(wanted) != 1 or others:
        raise BadInputError(
            f"{path}: found {len(wanted)} DLJobs{' and ' + ', '.join(others) if others else ''}; expected one "
            "DLJob and nothing else. Apply other objects with kubectl"
        )
    return wanted[0]


def with_namespace(manifest: Manifest, namespace: str) -> Manifest:
    """Return a copy of a valid manifest with the namespace in its metadata."""
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}


async def apply(api: Any, manifest: Manifest) -> Mapping[str, Any]:
    """Apply a valid manifest with a namespace (server-side apply), and return the stored job.

    Raise RefusedChangeError if a job with its name exists and must not be changed to the manifest. Raise ApiError if
    the API server rejects it.
    """
    from dljob.kube.kinds import DLJOB

    metadata = manifest["metadata"]
    if problem := await update_check.refusal(api, manifest, metadata["namespace"]):
        raise RefusedChangeError(str(metadata["name"]), problem)
    stored: Mapping[str, Any] = await api.apply(DLJOB, manifest, owner=FIELD_OWNER, strict=True)
    return stored
