"""Send requests to the API server with time limits and retries, and count them for metrics."""

import asyncio
import json
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic
from typing import Any

import aiohttp

from dljob.kube.answers import TOO_LARGE, Allowance, ApiError, bounded_text, causes, decoded, without_answer
from dljob.kube.kinds import DLJOB

CALL_LIMIT_S = 15.0
ATTEMPTS = 4
RETRY_FIRST_S = 0.25
MAX_RETRY_AFTER_S = 32.0
"""Maximum number of seconds to wait before a retry, even if the answer asks for more in its header Retry-After.

The API server asks for at most 32 s (``flowcontrol/dropped_requests_tracker.go``). A proxy may ask for hours, in which
a worker of the operator would do nothing else.
"""
_RETRIED = {429, 500, 502, 503, 504}

Body = dict[str, Any]
Requested = Callable[[str, str, int, float], None]
"""Callback after each request. Arguments: verb, resource, HTTP status code (0: no answer), duration in seconds."""


class Transport:
    """Sends requests on one session. It sends no write while ``may_write`` returns False."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: str,
        requested: Requested | None,
        may_write: Callable[[], bool] | None,
        max_nbytes: float,
    ) -> None:
        """The arguments are those of ``Api``."""
        self.session, self.server = session, server.rstrip("/")
        self.count: Requested = requested or (lambda verb, resource, code, seconds: None)
        self._may_write = may_write or (lambda: True)
        self._max_nbytes = max_nbytes

    async def send(
        self,
        verb: str,
        method: str,
        resource: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        content: str = "application/json",
        accept: str = "application/json",
        allowed: Allowance | None = None,
    ) -> Body:
        """Send a request, repeat it after temporary errors, and return the decoded answer.

        ``method``: HTTP method. ``verb`` and ``resource``: those of the request in the metrics. ``content`` and
        ``accept``: HTTP headers Content-Type and Accept. ``allowed``: the number of bytes that the answer may have,
        which is reduced by its size; None: that of one answer.

        Raise ApiError if the last of ``ATTEMPTS`` attempts fails. Raise it without further attempts if the error is not
        temporary, such as a conflict (code 409), or if ``may_write`` forbids the write.
        """
        attempt = 1
        while True:
            if method != "GET" and not self._may_write():
                raise ApiError(0, "NotLeader", f"{method} {path}: not sent, because this operator is not the leader")
            began = monotonic()
            wait_s = RETRY_FIRST_S * 2 ** (attempt - 1)
            try:
                code, answer, retry_after_s = await self._once(
                    method, path, body, params or {}, content, accept, allowed
                )
            except (aiohttp.ClientError, TimeoutError) as error:
                self.count(verb, resource, 0, monotonic() - began)
                failure = without_answer(error, f"{method} {path}", CALL_LIMIT_S)
            else:
                self.count(verb, resource, code, monotonic() - began)
                if code < 300:
                    return answer
                failure = ApiError(
                    code, answer.get("reason") or "", answer.get("message") or f"{method} {path}", causes(answer)
                )
                if code not in _RETRIED:
                    raise failure
                wait_s = max(wait_s, min(retry_after_s, MAX_RETRY_AFTER_S))
            if attempt == ATTEMPTS:
                raise failure
            attempt += 1
            await asyncio.sleep(wait_s)

    async def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str],
        content: str,
        accept: str,
        allowed: Allowance | None,
    ) -> tuple[int, Body, float]:
        async with self.session.request(
            method,
            self.server + path,
            params=params,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content, "Accept": accept},
            timeout=aiohttp.ClientTimeout(total=CALL_LIMIT_S),
        ) as response:
            allowed = allowed or Allowance(inf if params.get("limit") == "1" else self._max_nbytes)
            text = await bounded_text(response, allowed.nbytes)
            if text is None:
                message = f"{method} {path}: found an answer of more than {self._max_nbytes:.0f} bytes; expected less"
                return TOO_LARGE, {"reason": "AnswerTooLarge", "message": message}, 0.0
            allowed.nbytes -= len(text)
            retry_after = response.headers.get("Retry-After", "")
            code, answer = decoded(response.status, text, f"{method} {path}", about_jobs=DLJOB.plural in path)
            return code, answer, float(retry_after) if retry_after.isdigit() else 0.0
