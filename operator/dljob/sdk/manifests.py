"""Manifests in the forms in which callers of the SDK may give them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dljob.api import API_VERSION, DLJobSpec
from dljob.client import submission
from dljob.client.errors import BadInputError
from dljob.job.plan.recommendation import parse_job
from dljob.job.spec_errors import InvalidSpecError, Problem
from dljob.sdk.errors import DLJobError, InvalidJobError

JobLike = str | Path | Mapping[str, Any] | DLJobSpec
"""A path of a manifest, a whole manifest, or only its spec."""


def manifest_of(given: JobLike, name: str | None, namespace: str | None) -> Mapping[str, Any]:
    """Return the validated manifest of a job.

    ``name``: replaces the name in the manifest; required for a spec. ``namespace``: None, or the only namespace that
    the manifest may name. Raise InvalidJobError for an invalid manifest, and DLJobError for an unusable file.
    """
    try:
        manifest = _read(given)
    except BadInputError as error:
        raise DLJobError(str(error)) from None
    metadata = manifest.get("metadata")
    if name is not None and (metadata is None or isinstance(metadata, Mapping)):
        manifest = {**manifest, "metadata": {**(metadata or {}), "name": name}}
    try:
        job = parse_job(manifest)
    except InvalidSpecError as error:
        raise InvalidJobError(error.problems) from None
    except ValueError as error:
        raise InvalidJobError((Problem.of(str(error)),)) from None
    if namespace is not None and job.namespace not in (None, namespace):
        raise InvalidJobError(
            (
                Problem.of(
                    f"metadata.namespace: found {job.namespace}; expected {namespace}, the namespace of the client. "
                    "Remove one of them"
                ),
            )
        )
    return manifest


def _read(given: JobLike) -> Mapping[str, Any]:
    if isinstance(given, DLJobSpec):
        given = given.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    elif isinstance(given, str | Path):
        return submission.only_job(str(given))
    if given.keys() & {"apiVersion", "kind", "metadata", "spec"}:
        return given
    return {"apiVersion": API_VERSION, "kind": "DLJob", "metadata": {}, "spec": given}
