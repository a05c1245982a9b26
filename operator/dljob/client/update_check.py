"""Check, before a manifest is applied, whether it may change the existing job with its name."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dljob.api import DLJobSpec
from dljob.api.changes import refused_update
from dljob.client.access import FIELD_OWNER
from dljob.status import readable_status


async def refusal(api: Any, manifest: Mapping[str, Any], namespace: str) -> str | None:
    """Return why ``manifest`` must not be applied to the existing job of its name; None if the change is allowed.

    Nothing is changed: the API server only computes the result (a dry run), and refuses the change if its CRD has the
    rules about changes. This function evaluates the rules, too, because a CRD that is older than this release lacks
    them. Also return None if no job has this name, or if the server rejects the requests for another reason, such as
    missing permissions. Raise ApiError for other errors, such as a server that does not answer.
    """
    from dljob.kube import ApiError
    from dljob.kube.kinds import DLJOB

    metadata = {**manifest["metadata"], "namespace": namespace}
    stored: Mapping[str, Any] = {}
    try:
        stored = await api.get(DLJOB, namespace, metadata["name"])
        body = {**manifest, "metadata": metadata}
        resulting = await api.apply(DLJOB, body, owner=FIELD_OWNER, strict=True, dry_run=True)
    except ApiError as error:
        if error.code == 422:
            return between(stored, manifest) or error.message  # The server does not show numbers.
        if error.rejected:
            return None
        raise
    return between(stored, resulting)


def between(stored: Mapping[str, Any], resulting: Mapping[str, Any]) -> str | None:
    """Return why the stored DLJob must not be changed to the DLJob ``resulting``; None if it may be changed.

    Both are API objects. Also return None if a spec cannot be parsed, because the operator then reports the problem.
    """
    try:
        old, new = (DLJobSpec.model_validate(each["spec"], extra="ignore") for each in (stored, resulting))
    except ValidationError:
        return None  # The operator says what is wrong with a spec that only the server understands.
    found = refused_update(old, new, readable_status(stored.get("status") or {}))
    return found.message if found is not None else None
