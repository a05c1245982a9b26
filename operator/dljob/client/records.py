"""Read the last output of the ranks and the run report of a job that has ended from the ConfigMap ``<job>-logs``."""

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

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


def outputs_of(body: Mapping[str, Any]) -> dict[int, str]:
    """Return {rank: last output}, in the order of ranks, from ``body``, the ConfigMap ``<job>-logs``.

    The entries are compressed and encoded in base64; the results are plain text. Ignore entries whose names
    do not have the form ``rank-<number>.log.gz``.
    """
    data = body.get("binaryData") or {}
    return {rank: _unpacked(data[name]) for rank, name in _ranks(data).items()}


def attempts_of(body: Mapping[str, Any]) -> dict[int, str]:
    """Return {rank: name of the attempt that its output is from} from ``body``, the ConfigMap ``<job>-logs``.

    An attempt is one launch of all ranks; its name is ``TERM.NUMBER``. Most ranks have the output of the newest
    attempt. Ranks without a valid name, such as with an older trainer image, are left out.
    """
    data = body.get("binaryData") or {}
    newest = base64.b64decode(data.get("attempt", "")).decode(errors="replace")
    try:
        earlier = json.loads(base64.b64decode(data.get("earlier-attempts.json", "")) or "{}")
    except ValueError:
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

    ``kind``: ``html`` for the page with plots, or ``json`` for its data.
    """
    data = (body.get("binaryData") or {}).get(f"report.{kind}.gz")
    return None if data is None else _unpacked(data)


def _unpacked(data: str) -> str:
    """Decompress an entry of the ConfigMap, at most ``MAX_UNPACKED_NBYTES`` of it."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16: with the header of gzip
    return unpacker.decompress(base64.b64decode(data), MAX_UNPACKED_NBYTES).decode(errors="replace")
