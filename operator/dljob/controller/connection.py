"""Connect to the API server.

In a pod, the service account provides the credentials. Kubernetes replaces the token from time to time, so it is read
again periodically. Outside of a pod, the kubeconfig provides the credentials. The package ``kubernetes`` is needed only
for a kubeconfig with an exec plugin.
"""

import asyncio
import logging
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

import aiohttp
import kopf
import yaml

log = logging.getLogger("dljob")

TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
REREAD_S = 60.0
CLOSED_S = 2.0
"""Maximum time to close the connections of a session."""
_environment = threading.Lock()
"""Held while KUBECONFIG has another value, see ``_kubeconfig``."""


@dataclass(frozen=True)
class Connection:
    """Address of the API server, and the credentials for it."""

    info: kopf.ConnectionInfo
    in_pod: bool = False
    """True if the credentials are those of the pod's service account, whose token Kubernetes replaces."""

    @property
    def server(self) -> str:
        return self.info.server

    def session(self, responses: type[aiohttp.ClientResponse] = aiohttp.ClientResponse) -> aiohttp.ClientSession:
        """Return a new session, whose responses have the class ``responses``. The caller closes it."""
        return aiohttp.ClientSession(
            response_class=responses,
            connector=Connector(self.info.as_ssl_context()),
            headers={**self.info.as_http_headers(), "User-Agent": "dljob-operator"},
        )


class Connector(aiohttp.TCPConnector):
    """A connector whose connections are all closed when it is closed, also those of requests that were given up.

    aiohttp forgets a TLS connection whose request was given up, such as a watch that ends early. asyncio keeps the
    connection for up to 30 s until the server has answered TLS's close message. If the event loop ends before that, as
    at the end of a command or of a client of the SDK, the socket remains open.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        super().__init__(limit=0, ssl=tls, keepalive_timeout=60, socket_factory=self._made)
        self._sockets: WeakSet[socket.socket] = WeakSet()

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


def connect(kubeconfig: str | None = None, context: str | None = None) -> Connection:
    """Return the connection for the available credentials. Raise ValueError if there are none, or invalid ones.

    ``kubeconfig``: path of a kubeconfig, or several paths as in KUBECONFIG. ``context``: name of a context in it. If
    both are None, use the service account in a pod, and elsewhere the current context of the default kubeconfig.
    """
    settings = kopf.OperatorSettings()
    in_pod = TOKEN.exists() and kubeconfig is None and context is None
    try:
        if in_pod:
            info = kopf.login_with_service_account(settings=settings)
        elif kubeconfig is None and context is None:
            info = kopf.login_with_kubeconfig(settings=settings)
            if info is not None and not _has_credentials(info):
                info = kopf.login_via_client(logger=log, settings=settings) or info
        else:
            with _kubeconfig(kubeconfig, context):
                info = kopf.login_with_kubeconfig(settings=settings)
            if info is not None and not _has_credentials(info):
                info = _via_client(info, kubeconfig, context)
    except (kopf.LoginError, KeyError, TypeError, OSError, yaml.YAMLError) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"kubeconfig: found an invalid file or invalid credentials ({what}); expected valid ones. Set KUBECONFIG "
            "to a kubeconfig that works"
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
    return Connection(info, in_pod)


def _has_credentials(info: kopf.ConnectionInfo) -> bool:
    return bool(info.token or info.username or info.certificate_path or info.certificate_data)


@contextmanager
def _kubeconfig(kubeconfig: str | None, context: str | None) -> Iterator[None]:
    """Let kopf read another kubeconfig or another context, both of which it takes only from KUBECONFIG.

    kopf merges the files in KUBECONFIG, and the first ``current-context`` wins. The variable has its old value again
    afterwards.
    """
    with _environment, tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as chosen:
        before = os.environ.get("KUBECONFIG")
        yaml.safe_dump({} if context is None else {"current-context": context}, chosen)
        chosen.flush()
        paths = kubeconfig or before or str(Path.home() / ".kube/config")
        os.environ["KUBECONFIG"] = os.pathsep.join([chosen.name, paths])
        try:
            yield
        finally:
            if before is None:
                del os.environ["KUBECONFIG"]
            else:
                os.environ["KUBECONFIG"] = before


def _via_client(info: kopf.ConnectionInfo, kubeconfig: str | None, context: str | None) -> kopf.ConnectionInfo:
    """Return ``info`` with credentials from the plugin that the kubeconfig names, such as that of a cloud provider.

    Return ``info`` unchanged if the package ``kubernetes`` is not installed.
    """
    try:
        from kubernetes.config import ConfigException, new_client_from_config
    except ImportError:
        return info
    try:
        found = new_client_from_config(kubeconfig, context).configuration
    except ConfigException as error:
        raise kopf.LoginError(str(error)) from error
    header = found.get_api_key_with_prefix("BearerToken") or found.get_api_key_with_prefix("authorization") or ""
    return replace(
        info,
        token=header.rpartition(" ")[2] or None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
    )


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
