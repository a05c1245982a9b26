"""A proxy in front of the API server, which refuses, loses, delays or silences requests while a disturbance lasts."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

import aiohttp
import yaml
from aiohttp import web

from dljob.controller.connection import Connector
from support.cluster.api_server import access

MAX_BODY_NBYTES = 8 * 2**20
_PASSED_ON = ("Content-Type", "Accept")
_SILENCE_S = 0.1
logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # Each connection that is cut would be logged.


class Act(StrEnum):
    """What happens to a request."""

    ANSWER = "answer"
    """The proxy answers with an error itself."""
    LOSE_REQUEST = "lose-request"
    """The connection ends before the API server gets the request."""
    LOSE_ANSWER = "lose-answer"
    """The API server handles the request, but the connection ends before its answer arrives."""
    DELAY = "delay"
    SILENCE = "silence"
    """Nothing arrives any more at a watch that is open, and the connection stays."""
    HOLD = "hold"
    """Requests get no answer, and the connection stays. Watches that are open are silent."""
    CUT_WATCHES = "cut-watches"
    """The connections of all watches end, and those of new ones after a moment."""


@dataclass(frozen=True)
class Call:
    """A request to the API server. ``resource``: such as ``pods`` or ``dljobs``. ``watch``: it asks for a watch."""

    method: str
    resource: str
    watch: bool


@dataclass(frozen=True)
class Disturbance:
    """What the proxy does to requests. ``share``: the share of the requests that this concerns, 0 to 1."""

    name: str
    act: Act
    concerns: Callable[[Call], bool]
    share: float = 1.0
    code: int = 0
    reason: str = ""
    delay_s: float = 0.0


def is_write(call: Call) -> bool:
    return call.method != "GET"


DISTURBANCES: tuple[Disturbance, ...] = (
    Disturbance("too many requests", Act.ANSWER, lambda call: True, 0.5, 429, "TooManyRequests"),
    Disturbance("internal errors", Act.ANSWER, lambda call: True, 0.3, 500, "InternalError"),
    Disturbance("unavailable", Act.ANSWER, lambda call: True, 1.0, 503, "ServiceUnavailable"),
    Disturbance("conflicts", Act.ANSWER, is_write, 0.5, 409, "Conflict"),
    Disturbance("events refused", Act.ANSWER, lambda call: call.resource == "events" and is_write(call), 1.0, 403, "Forbidden"),
    Disturbance("expired watches", Act.ANSWER, lambda call: call.watch, 0.7, 410, "Expired"),
    Disturbance("requests lost", Act.LOSE_REQUEST, lambda call: True, 0.4),
    Disturbance("partial applies", Act.LOSE_ANSWER, is_write, 0.5),
    Disturbance("slow answers", Act.DELAY, lambda call: True, 0.5, delay_s=1.5),
    Disturbance("silent watches", Act.SILENCE, lambda call: call.watch),
    Disturbance("dropped watches", Act.CUT_WATCHES, lambda call: call.watch),
    Disturbance("no connection", Act.LOSE_REQUEST, lambda call: True),
)  # fmt: skip


class FaultyApi:
    """A proxy on this machine with a kubeconfig of its own. Without a disturbance, it passes everything on."""

    def __init__(self, kubeconfig: str, folder: Path, seed: int) -> None:
        """``kubeconfig``: the path of the API server's. ``folder``: for the proxy's. ``seed``: of random choices."""
        self._server, self._tls = access(kubeconfig)
        self.disturbance: Disturbance | None = None
        """The present disturbance, or None. It may be set at any time, by any thread."""
        self.disturbed = 0
        """Requests that were disturbed so far."""
        self.kubeconfig = folder / "kubeconfig-of-proxy"
        self._random = Random(seed)
        self._watches: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(30)
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "proxy", "user": {"token": "of-the-proxy"}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        }  # fmt: skip
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def begin(self, disturbance: Disturbance) -> None:
        """Start a disturbance, which lasts until ``end``."""
        self.disturbance = disturbance
        if disturbance.act is Act.CUT_WATCHES:
            self._loop.call_soon_threadsafe(self._cut_watches)

    def end(self) -> None:
        self.disturbance = None

    def _cut_watches(self) -> None:
        for transport in list(self._watches):
            transport.abort()

    async def _serve(self) -> int:
        self._session = aiohttp.ClientSession(connector=Connector(self._tls))
        application = web.Application(client_max_size=MAX_BODY_NBYTES)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _end(self) -> None:
        self._cut_watches()
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:  # aiohttp leaves handlers whose connections were cut.
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    def _chosen(self, call: Call) -> Disturbance | None:
        found = self.disturbance
        if found is None or not found.concerns(call) or self._random.random() >= found.share:
            return None
        if found.act not in (Act.SILENCE, Act.HOLD):
            self.disturbed += 1
        return found

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.method, _resource(request.path), request.query.get("watch") in ("true", "1"))
        body, found = await request.read(), self._chosen(call)
        match found.act if found is not None else None:
            case Act.ANSWER:
                assert found is not None
                return _error(found)
            case Act.LOSE_REQUEST | Act.CUT_WATCHES:
                _abort(request)
            case Act.HOLD:
                while self._silent(call):
                    await asyncio.sleep(_SILENCE_S)
            case Act.DELAY:
                assert found is not None
                await asyncio.sleep(found.delay_s)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        timeout = aiohttp.ClientTimeout(total=None if call.watch else 60)
        try:
            async with self._session.request(
                request.method, self._server + request.path_qs, data=body or None, headers=headers, timeout=timeout
            ) as answer:
                if found is not None and found.act is Act.LOSE_ANSWER:
                    await answer.read()
                    _abort(request)
                return await self._answered(request, answer, call)
        except aiohttp.ClientError:
            _abort(request)
            raise

    async def _answered(self, request: web.Request, answer: aiohttp.ClientResponse, call: Call) -> web.StreamResponse:
        kept = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
        if not call.watch:
            return web.Response(status=answer.status, body=await answer.read(), headers=kept)
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self._watches.add(transport)
        try:
            async for data in answer.content.iter_any():
                while self._silent(call):
                    await asyncio.sleep(_SILENCE_S)
                await response.write(data)
        except (aiohttp.ClientError, ConnectionError):
            transport.abort()
        finally:
            self._watches.discard(transport)
        with suppress(ConnectionError):
            await response.write_eof()
        return response

    def _silent(self, call: Call) -> bool:
        found = self.disturbance
        return found is not None and found.act in (Act.SILENCE, Act.HOLD) and found.concerns(call)


def _resource(path: str) -> str:
    """Return the resource in a path of the API, such as ``pods``; empty if there is none."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[:1] == ["api"] else parts[3:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return parts[0] if parts else ""


def _error(found: Disturbance) -> web.Response:
    status = {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": found.code, "reason": found.reason,
        "message": f"disturbance: {found.name}",
    }  # fmt: skip
    return web.json_response(status, status=found.code, headers={"Retry-After": "1"} if found.code == 429 else {})


def _abort(request: web.Request) -> None:
    """End the connection of a request without an answer."""
    if isinstance(request.transport, asyncio.Transport):
        request.transport.abort()
    raise ConnectionResetError("disturbance")
