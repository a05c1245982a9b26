"""Connect to the API server.

In a pod, the service account provides the credentials. Kubernetes replaces the token from time to time, so it is read
again periodically. Outside of a pod, the kubeconfig provides the credentials. The package ``kubernetes`` is needed only
for a kubeconfig with an exec plugin.
"""

import asyncio
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import kopf
import yaml

log = logging.getLogger("dljob")

TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
REREAD_S = 60.0


@dataclass(frozen=True)
class Connection:
    """Address of the API server, and the credentials for it."""

    info: kopf.ConnectionInfo

    @property
    def server(self) -> str:
        return self.info.server

    def session(self, responses: type[aiohttp.ClientResponse] = aiohttp.ClientResponse) -> aiohttp.ClientSession:
        """Return a new session, whose responses have the class ``responses``. The caller closes it."""
        return aiohttp.ClientSession(
            response_class=responses,
            connector=aiohttp.TCPConnector(limit=0, ssl=self.info.as_ssl_context(), keepalive_timeout=60),
            headers={**self.info.as_http_headers(), "User-Agent": "dljob-operator"},
        )


def connect() -> Connection:
    """Return the connection for the available credentials. Raise ValueError if there are none, or invalid ones."""
    settings = kopf.OperatorSettings()
    try:
        if TOKEN.exists():
            info = kopf.login_with_service_account(settings=settings)
        else:
            info = kopf.login_with_kubeconfig(settings=settings)
            if info is not None and not (info.token or info.username or info.certificate_path or info.certificate_data):
                info = kopf.login_via_client(logger=log, settings=settings) or info
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
    if TOKEN.exists() and (host := os.environ.get("KUBERNETES_SERVICE_HOST")):
        # The IP address works even if the cluster's DNS is not available yet.
        address = f"[{host}]" if ":" in host else host
        info = replace(info, server=f"https://{address}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}")
    return Connection(info)


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
