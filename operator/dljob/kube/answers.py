"""Read and decode the answers of the API server, without more memory than the operator can spare for one of them."""

from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import aiohttp

from dljob.kube.objects.bounds import bounded_answer, decoded_answer

MAX_ANSWER_NBYTES = 10 * 2**20
"""Maximum size of an answer in bytes, except for a page of one object. A larger one is an ApiError with ``TOO_LARGE``.

An object of 1.5 MB can have 9 MB in an answer, because JSON has six bytes for each ``<``. Everybody who may create pods
or ConfigMaps could otherwise fill the memory of the operator with one page of a list.
"""
TOO_LARGE = 413

Body = dict[str, Any]


class Written(Enum):
    """What became of a status that was to be written."""

    NOT = "the job is gone"
    ALONE = "it is stored"
    AND_CHANGED = "it is stored, and something else of the job has changed meanwhile"
    """The cache has this change, and the watch event about it says nothing new."""


async def bounded_text(response: aiohttp.ClientResponse, max_nbytes: float) -> bytes | None:
    """Return the body of a response. Return None, and close the connection, if it has more than ``max_nbytes``."""
    text = bytearray()
    async for part in response.content.iter_any():
        text += part
        if len(text) > max_nbytes:
            response.close()
            return None
    return bytes(text)


def decoded(text: bytes, *, about_jobs: bool) -> Body:
    """Decode an answer. If it is no JSON, return its beginning as ``message``. ``about_jobs``: it has DLJobs."""
    try:
        # Everybody may store objects that the JSON decoder cannot read, and DLJobs that fill the memory.
        answer = (bounded_answer if about_jobs else decoded_answer)(text) if text else {}
    except ValueError:
        answer = {"message": text[:500].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {}


def causes(answer: Body) -> tuple[str, ...]:
    """Return the causes in the details of an error, as ``field: message``."""
    details = answer.get("details")
    listed = details.get("causes") if isinstance(details, dict) else None
    found = listed if isinstance(listed, list) else []
    return tuple(f"{each.get('field', '')}: {each.get('message', '')}" for each in found if isinstance(each, dict))


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream without line ends. Skip empty lines. Lines may be longer than aiohttp's buffer."""
    parts: list[bytes] = []
    async for data in content.iter_any():
        *ends, rest = data.split(b"\n")
        for end in ends:
            line = b"".join((*parts, end))
            parts = []
            if line:
                yield line
        if rest:
            parts.append(rest)
