"""Connect to the API server with the user's credentials, and describe its errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

from dljob.client.errors import BadInputError

FIELD_OWNER = "kubectl-dljob"
"""Field manager of the changes that users make with the command line or the SDK."""
PATIENCE_S = 600.0
"""Seconds for which those who follow a job bear that the API server does not answer, such as while it is upgraded."""


def connection(kubeconfig: str | None = None, context: str | None = None, *, with_plugin: bool = True) -> Any:
    """Return the connection to the API server, of type ``dljob.controller.connection.Connection``.

    ``kubeconfig``, ``context`` and ``with_plugin``: see ``dljob.controller.connection.connect``. Raise BadInputError
    without usable credentials, or if the operator's dependencies are not installed.
    """
    try:
        from dljob.controller.connection import connect
    except ImportError as error:
        raise missing_package(error) from None
    try:
        return connect(kubeconfig, context, with_plugin=with_plugin)
    except ValueError as error:
        raise BadInputError(str(error)) from None


@asynccontextmanager
async def opened(connection: Any) -> AsyncIterator[Any]:
    """Open a session of a connection, and yield a client of type ``dljob.kube.Api``.

    Raise BadInputError if the certificates or keys of the kubeconfig cannot be used.
    """
    from dljob.controller.connection import keep_token_fresh
    from dljob.kube import Api

    try:
        opening = connection.session()
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"kubeconfig: found unusable certificates or keys ({error}); expected valid ones. Correct their paths or "
            "data"
        ) from None
    async with opening as session:
        renewal = asyncio.ensure_future(keep_token_fresh(session)) if connection.in_pod else None
        try:
            yield Api(session, connection.server, max_nbytes=inf)
        finally:
            if renewal is not None:
                renewal.cancel()


def missing_package(error: ImportError) -> BadInputError:
    """Return the error for a missing dependency of the operator."""
    return BadInputError(
        f"current cluster: found no Python package {error.name}, which dljob needs to read the cluster; expected this "
        "package. Run pip install './operator[operator]' in a clone of dljob, or plan for a cluster that a file "
        "describes"
    )


def in_words(error: Any) -> str:
    """Return the message for the user about an error of the API server (``dljob.kube.ApiError``)."""
    if error.code == 0:
        return f"the API server does not answer: {error.message}. Check the kubeconfig and the cluster"
    if error.code == 401:
        return "the API server rejected the credentials. Check the kubeconfig"
    if error.not_found and ("requested resource" in error.message or "page not found" in error.message):
        return "the cluster has no DLJob resource. Install dljob first (helm install dljob charts/dljob)"
    if error.not_found and error.message.startswith("namespaces "):
        return f"{error.message}. Create it with kubectl create namespace, or name another one with --namespace"
    if not error.reason:  # The answer is not one of Kubernetes.
        return f"the API server answered with code {error.code}: {error.message}"
    return str(error.message)
