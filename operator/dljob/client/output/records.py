"""Read the last output of the ranks and the run report of a job that has ended from the ConfigMap ``<job>-logs``."""

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from dljob.client.errors import BadInputError

MAX_UNPACKED_NBYTES = 2**26
"""Maximum number of bytes of one entry. 1 MiB, the limit of a ConfigMap, can be unpacked to 1 GiB."""


async def logs_of(api: Any, namespace: str, name: str) -> Mapping[str, Any]:
    """Return the ConfigMap ``name`` (``<job>-logs``) as an API object; an empty mapping if it does not exist.

    The ConfigMap has the last output of the job's ranks, and the run report. Raise ApiError for other errors.
    """
    from dljob.kube import ApiError
    from dljob.kube.kinds import CONFIG_MAP

    try:
        found: Mapping[str, Any] = await api.get(CONFIG_MAP, namespace, name)
    except ApiError as error:
        if not error.not_found:
            raise
        return {}
    return found


async def job_of(api: Any, namespace: str, job: str) -> Mapping[str, Any]:
    """Return a DLJob as an API object; an empty mapping if it does not exist, or if the user may not read it."""
    from dljob.kube import ApiError
    from dljob.kube.kinds import DLJOB

    try:
        found: Mapping[str, Any] = await api.get(DLJOB, namespace, job)
    except ApiError as error:
        if not (error.not_found or error.forbidden):
            raise
        return {}
    return found


async def job_is_missing(api: Any, namespace: str, job: str) -> bool:
    """Return True if the namespace has no such DLJob; False also if the user may not read it."""
    from dljob.kube import ApiError
    from dljob.kube.kinds import DLJOB

    try:
        await api.get(DLJOB, namespace, job)
    except ApiError as error:
        return bool(error.not_found)
    return False


def outputs_of(body: Mapping[str, Any]) -> dict[int, str]:
    """Return {rank: last output}, in the order of ranks, from ``body``, the ConfigMap ``<job>-logs``.

    The entries are compressed and encoded in base64; the results are plain text. Ignore entries whose names
    do not have the form ``rank-<number>.log.gz``. Raise BadInputError if an entry is damaged.
    """
    return {rank: output_of(body, rank) for rank in ranks_of(body)}


def ranks_of(body: Mapping[str, Any]) -> list[int]:
    """Return the ranks whose last output the ConfigMap ``body`` (``<job>-logs``) has, in their order."""
    return list(_ranks(body.get("binaryData") or {}))


def output_of(body: Mapping[str, Any], rank: int) -> str:
    """Return the last output of one of the ranks in ``ranks_of(body)``. Raise BadInputError if its entry is damaged."""
    return _unpacked(body, _ranks(body["binaryData"])[rank])


def attempts_of(body: Mapping[str, Any]) -> dict[int, str]:
    """Return {rank: name of the attempt that its output is from} from ``body``, the ConfigMap ``<job>-logs``.

    An attempt is one launch of all ranks; its name is ``TERM.NUMBER``. Most ranks have the output of the newest
    attempt. Ranks without a valid name, such as with an older trainer image, are left out.
    """
    data = body.get("binaryData") or {}
    newest = base64.b64decode(data.get("attempt", "")).decode(errors="replace")
    try:
        earlier = json.loads(base64.b64decode(data.get("earlier-attempts.json", "")) or "{}")
    except (ValueError, RecursionError):
        earlier = {}
    if not isinstance(earlier, dict):
        return {}
    named = {rank: earlier.get(name, newest) for rank, name in _ranks(data).items()}
    return {rank: name for rank, name in named.items() if isinstance(name, str) and re.fullmatch(r"\d+\.\d+", name)}


def _ranks(names: Iterable[str]) -> dict[int, str]:
    """Return {rank: name of the entry with its output}, in the order of ranks."""
    found = {int(match[1]): name for name in names if (match := re.fullmatch(r"rank-(\d+)\.log\.gz", name))}
    return dict(sorted(found.items()))


def report_of(body: Mapping[str, Any], kind: str) -> str | None:
    """Return the run report from ``body``, the ConfigMap ``<job>-logs``; None if ``body`` has no such report.

    ``kind``: ``html`` for the page with plots, or ``json`` for its data. Raise BadInputError if the entry is damaged.
    """
    name = f"report.{kind}.gz"
    return _unpacked(body, name) if name in (body.get("binaryData") or {}) else None


def report_data_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the data of the run report from ``body``, the ConfigMap ``<job>-logs``; None if it has no report.

    Raise BadInputError if the entry is damaged.
    """
    text = report_of(body, "json")
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(body, "report.json.gz", str(error)) from None
    if not isinstance(found, dict):
        raise _damaged(body, "report.json.gz", f"JSON of type {type(found).__name__} in place of an object")
    return found


def _unpacked(body: Mapping[str, Any], name: str) -> str:
    """Decompress an entry of the ConfigMap, at most ``MAX_UNPACKED_NBYTES`` of it.

    Raise BadInputError if it is not a complete gzip file.
    """
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16: with the header of gzip
    try:
        found = unpacker.decompress(base64.b64decode(body["binaryData"][name]), MAX_UNPACKED_NBYTES)
    except (zlib.error, ValueError) as error:
        raise _damaged(body, name, str(error)) from None
    if not unpacker.eof and len(found) < MAX_UNPACKED_NBYTES:
        raise _damaged(body, name, "it ends early")
    return found.decode(errors="replace")


def _damaged(body: Mapping[str, Any], name: str, reason: str) -> BadInputError:
    """Return the error about a damaged entry. The name of the ConfigMap is ``<job>-logs``."""
    stored = str((body.get("metadata") or {}).get("name") or "JOB-logs")
    return BadInputError(
        f"{name} in ConfigMap {stored}: found a damaged entry ({reason}); expected a complete gzip file, as the job's "
        "pods write it. A job with checkpoints has its reports and logs beside them, too: copy these with dljob "
        f"get-model {stored.removesuffix('-logs')} DIR --all"
    )
