"""Apply the manifest of one DLJob to the cluster, after the checks that need no change."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

from dljob.client import files, update_check
from dljob.client.access import FIELD_OWNER
from dljob.client.errors import BadInputError, RefusedChangeError

Manifest = Mapping[str, Any]
_ATTEMPTS = 5
"""Maximum number of attempts to write the field managers of a job whose status the operator writes meanwhile."""


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

    Changes that users made to the job with the SDK end if the manifest lacks their fields. Those of other field
    managers continue. Raise RefusedChangeError if a job with its name exists and must not be changed to the manifest.
    Raise ApiError if the API server rejects it.
    """
    from dljob.kube.kinds import DLJOB

    metadata = manifest["metadata"]
    await _adopt_changes(api, metadata["namespace"], metadata["name"])
    if problem := await update_check.refusal(api, manifest, metadata["namespace"]):
        raise RefusedChangeError(str(metadata["name"]), problem)
    stored: Mapping[str, Any] = await api.apply(DLJOB, manifest, owner=FIELD_OWNER, strict=True)
    return stored


async def _adopt_changes(api: Any, namespace: str, name: str) -> None:
    """Add the fields that ``FIELD_OWNER`` has changed in a stored job to those that it has applied.

    The API server keeps an update, such as that of ``Job.suspend`` of the SDK, apart from the applies of the same field
    manager, and an apply removes only fields of earlier applies. ``kubectl apply --server-side`` moves the fields of
    its client-side applies in the same way. Do nothing if there is no such job or update, or if the user may not read
    or change the job. Raise ApiError for other errors.
    """
    from dljob.kube import ApiError
    from dljob.kube.kinds import DLJOB

    for left in reversed(range(_ATTEMPTS)):
        try:
            meta = (await api.get(DLJOB, namespace, name))["metadata"]
            if (managed := _adopted(meta.get("managedFields") or [])) is None:
                return
            same = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
            patch = {"metadata": {**same, "managedFields": managed}}
            await api.merge(DLJOB, namespace, name, patch, owner=FIELD_OWNER)
        except ApiError as error:
            if error.rejected:
                return
            if not error.conflict or not left:
                raise
        else:
            return


def _adopted(managed: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the managed fields of an object with one entry of ``FIELD_OWNER``; None if it has no update of them."""
    own = [each for each in managed if each.get("manager") == FIELD_OWNER and not each.get("subresource")]
    if not any(each.get("operation") == "Update" for each in own):
        return None
    fields = reduce(_union, (each.get("fieldsV1") or {} for each in own))
    return [*(each for each in managed if each not in own), {**own[0], "operation": "Apply", "fieldsV1": fields}]


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the union of two sets of fields in the format FieldsV1, which nests them."""
    return {**one, **{key: _union(one.get(key) or {}, below) for key, below in other.items()}}
