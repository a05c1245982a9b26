"""Read and decode the answers of the API server, without more memory than the operator can spare for one of them."""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp

from dljob.kube.objects.bounds import bounded_answer, decoded_answer

MAX_ANSWER_NBYTES = 10 * 2**20
"""Maximum size of an answer in bytes, except for a page of one object. A larger one is an ApiError with ``TOO_LARGE``.

An object of 1.5 MB can have 9 MB in an answer, because JSON has six bytes for each ``<``. Everybody who may create pods
or ConfigMaps could otherwise fill the memory of the operator with one page of a list.
"""
TOO_LARGE, BAD_GATEWAY = 413, 502

Body = dict[str, Any]


class Written(Enum):
    """What became of a status that was to be written."""

    NOT = "the job is gone"
    ALONE = "it is stored"
    AND_CHANGED = "it is stored, and something else of the job has changed meanwhile"
    """The cache has this change, and the watch event about it says nothing new."""


class ApiError(Exception):
    """The API server answered with an error, or did not answer (``code`` 0)."""

    def __init__(self, code: int, reason: str, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message
        self.causes = causes
        """The problems of an invalid object, each as ``field: message``. Empty if the server names none."""

    @property
    def not_found(self) -> bool:
        return self.code == 404

    @property
    def forbidden(self) -> bool:
        return self.code == 403

    @property
    def conflict(self) -> bool:
        return self.code == 409

    @property
    def rejected(self) -> bool:
        """Return True if the API server refused the request for a reason that a retry alone does not change.

        Such reasons are an invalid object, and a quota or policy that forbids it.
        """
        return self.code in (400, 403, 404, 405, 413, 415, 422)


class RejectedError(Exception):
    """The API server rejected an object of a job for a reason that a repetition does not change."""

    def __init__(self, kind: str, name: str, message: str) -> None:
        super().__init__(f"{kind} {name}: {message}")
        self.kind, self.name, self.message = kind, name, message


def without_answer(error: Exception, request: str, limit_s: float) -> ApiError:
    """Return the ApiError for a request without an answer, such as ``GET /version``, because of ``error``.

    The TimeoutError of a request that takes longer than ``limit_s`` seconds has no text.
    """
    name = type(error).__name__
    text = str(error) or (f"no whole answer within {limit_s:g} s" if isinstance(error, TimeoutError) else name)
    return ApiError(0, name, f"{request}: {text}")


@dataclass
class Allowance:
    """Number of bytes that further answers to one caller may have. Each answer reduces it."""

    nbytes: float


async def bounded_text(response: aiohttp.ClientResponse, max_nbytes: float) -> bytes | None:
    """Return the body of a response. Return None, and close the connection, if it has more than ``max_nbytes``."""
    text = bytearray()
    async for part in response.content.iter_any():
        text += part
        if len(text) > max_nbytes:
            response.close()
            return None
    return bytes(text)


def decoded(code: int, text: bytes, request: str, *, about_jobs: bool) -> tuple[int, Body]:
    """Decode the answer with the HTTP status ``code`` to a request, such as ``GET /version``. Return (code, answer).

    The beginning of an error that is no JSON object is the ``message``. A success that is none comes from a proxy, not
    from the API server, and becomes the error ``BAD_GATEWAY``. ``about_jobs``: the answer has DLJobs.
    """
    answer: Any = None
    with suppress(ValueError):
        # Everybody may store objects that the JSON decoder cannot read, and DLJobs that fill the memory.
        answer = (bounded_answer if about_jobs else decoded_answer)(text) if text else {}
    if isinstance(answer, dict):
        return code, answer
    shown = text[:500].decode(errors="replace")
    if code >= 300:
        return code, {"message": shown}
    message = (
        f"{request}: found an answer that is no JSON object ({shown[:60]!r}); expected one of the API server. Check "
        "its address, and proxies before it"
    )
    return BAD_GATEWAY, {"reason": "NoObject", "message": message}


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
