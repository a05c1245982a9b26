"""Connect to the API server.

In a pod, the service account provides the credentials. Kubernetes replaces the token from time to time, so it is read
again periodically. Outside of a pod, the kubeconfig provides the credentials.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import aiohttp
import kopf
import yaml

from dljob.controller.kubeconfig import default_kubeconfig, login
from dljob.controller.proxy import proxy_from_environment

log = logging.getLogger("dljob")

TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
REREAD_S = 60.0
CLOSED_S = 2.0
"""Maximum time to close the connections of a session."""


@dataclass(frozen=True)
class Connection:
    """Address of the API server, and the credentials for it."""

    info: kopf.ConnectionInfo
    in_pod: bool = False
    """True if the credentials are those of the pod's service account, whose token Kubernetes replaces."""
    again: Callable[[], "Connection"] | None = None
    """Function that reads the kubeconfig and calls its plugin again, for another token; None in a pod."""
    server_name: str | None = None
    """Name that the certificate of the API server must have (``tls-server-name``); None: that of the address."""

    @property
    def server(self) -> str:
        return self.info.server

    def session(self, responses: type[aiohttp.ClientResponse] = aiohttp.ClientResponse) -> aiohttp.ClientSession:
        """Return a new session, whose responses have the class ``responses``. The caller closes it."""
        return aiohttp.ClientSession(
            response_class=responses,
            connector=Connector(self.info.as_ssl_context(), self.server_name),
            headers={**self.info.as_http_headers(), "User-Agent": "dljob-operator"},
            middlewares=() if self.again is None else (Renewal(self),),
            proxy=self.info.proxy_url,
        )


class Renewal:
    """A middleware of a session that logs in again if the API server rejects the token, and repeats the request.

    Tokens of cloud providers expire after 15 minutes to one hour, and a command may follow a job for days.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, asyncio.Lock()
        self._header: str | None = None
        """The header Authorization after the last login; None: that of the session."""

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if self._header is not None:
            request.headers["Authorization"] = self._header
        response = await handler(request)
        sent = request.headers.get("Authorization")
        if response.status != 401 or sent is None:
            return response
        async with self._lock:
            if self._header in (None, sent):  # Otherwise, another request has logged in meanwhile.
                self._header = await asyncio.to_thread(self._another) or self._header
        renewed = self._header
        if renewed is None or renewed == sent:
            return response
        response.close()
        request.headers["Authorization"] = renewed
        return await handler(request)

    def _another(self) -> str | None:
        """Log in again, and return the new header Authorization. Return None if the login fails or has no token."""
        assert self._connection.again is not None, "only sessions that can log in again have this middleware"
        try:
            return self._connection.again().info.as_http_headers().get("Authorization")
        except ValueError as error:
            log.debug("the login after an expired token failed: %s", error)
            return None


class Connector(aiohttp.TCPConnector):
    """A connector whose connections are all closed when it is closed, also those of requests that were given up.

    aiohttp forgets a TLS connection whose request was given up, such as a watch that ends early. asyncio keeps the
    connection for up to 30 s until the server has answered TLS's close message. If the event loop ends before that, as
    at the end of a command or of a client of the SDK, the socket remains open.
    """

    def __init__(self, tls: ssl.SSLContext, server_name: str | None = None) -> None:
        """``server_name``: name that the server's certificate must have; None: that of the address."""
        super().__init__(limit=0, ssl=tls, keepalive_timeout=60, socket_factory=self._made)
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._server_name = server_name

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        if self._server_name is not None:
            req.server_hostname = self._server_name
        return await super().connect(req, traces, timeout)

    def _made(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.add(made)
        return made

    async def close(self, *, abort_ssl: bool = False) -> None:
        await super().close(abort_ssl=True)
        for each in self._sockets:
            with suppress(OSError):  # It is closed already.
                each.shutdown(socket.SHUT_RDWR)
        # asyncio closes a socket only after it has noticed that the connection has ended.
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSED_S):
                while any(each.fileno() >= 0 for each in self._sockets):
                    await asyncio.sleep(0.001)


def connect(kubeconfig: str | None = None, context: str | None = None, *, with_plugin: bool = True) -> Connection:
    """Return the connection for the available credentials. Raise ValueError if there are none, or invalid ones.

    ``kubeconfig``: path of a kubeconfig, or several paths as in KUBECONFIG. ``context``: name of a context in it. If
    both are None, use the service account in a pod, and elsewhere the current context of the default kubeconfig.
    ``with_plugin``: False: do not call a plugin that logs in. The connection is then good for its namespace alone.
    """
    in_pod = TOKEN.exists() and kubeconfig is None and context is None
    info: kopf.ConnectionInfo | None = None
    server_name: str | None = None
    try:
        if in_pod:
            info = kopf.login_with_service_account(settings=kopf.OperatorSettings())
        elif paths := kubeconfig or os.environ.get("KUBECONFIG") or default_kubeconfig(context):
            info, server_name = login(paths, context, with_plugin=with_plugin)
    except (kopf.LoginError, LookupError, AttributeError, TypeError, OSError, yaml.YAMLError, UnicodeError) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"kubeconfig: found an invalid file or invalid credentials ({what}); expected valid ones. Name a "
            "kubeconfig that works, such as by KUBECONFIG"
        ) from error
    if info is None:
        raise ValueError(
            "credentials: found none for the API server; expected a pod's service account or a kubeconfig. Set "
            "KUBECONFIG to the path of a kubeconfig"
        )
    if in_pod and (host := os.environ.get("KUBERNETES_SERVICE_HOST")):
        # The IP address works even if the cluster's DNS is not available yet.
        address = f"[{host}]" if ":" in host else host
        info = replace(info, server=f"https://{address}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}")
    if not info.proxy_url:
        info = replace(info, proxy_url=proxy_from_environment(info.server, os.environ))
    return Connection(info, in_pod, None if in_pod else partial(connect, kubeconfig, context), server_name)


async def keep_token_fresh(*sessions: aiohttp.ClientSession) -> None:
    """Read the token of the service account every ``REREAD_S`` seconds, and set it in the sessions.

    Kubernetes replaces the token long before the old one expires. In a pod, this runs until it is cancelled. Outside of
    a pod, it returns immediately.
    """
    while TOKEN.exists():
        await asyncio.sleep(REREAD_S)
        token = TOKEN.read_text(encoding="utf-8").strip()
        for session in sessions:
            session.headers["Authorization"] = f"Bearer {token}"
