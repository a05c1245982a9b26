"""The current cluster as the command line sees it: by the operator's own observe code."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dljob.cli.errors import BadInputError
from dljob.cluster import ClusterView
from dljob.job.recommendation import parse_profiles

T = TypeVar("T")
FIELD_OWNER = "kubectl-dljob"


def add_namespace(command: argparse.ArgumentParser) -> None:
    command.add_argument("-n", "--namespace", help="namespace; default: the kubeconfig's, else 'default'")


def reach(work: Callable[[Any], Awaitable[T]]) -> T:
    """Run ``work(api)`` against the API server of the kubeconfig. Raises BadInputError when it cannot be reached.

    What the operator needs is imported only here, so that planning from files works without it.
    """
    try:
        from dljob.kube import ApiError
    except ImportError as error:
        raise BadInputError(
            f"the current cluster needs the package {error.name}: pip install 'dljob[operator]', or use --cluster FILE"
        ) from None

    async def connected() -> T:
        async with _api() as api:
            return await work(api)

    try:
        return asyncio.run(connected())
    except ApiError as error:
        raise BadInputError(_in_words(error)) from None
    except ValueError as error:
        raise BadInputError(str(error)) from None


def _in_words(error: Any) -> str:
    if error.code == 0:
        return f"the API server does not answer: {error.message}; check KUBECONFIG and the cluster"
    if error.code == 401:
        return "the API server does not know you: check the credentials in KUBECONFIG"
    if error.not_found and ("requested resource" in error.message or "page not found" in error.message):
        return "the cluster has no DLJob resource: install dljob first (helm install dljob charts/dljob)"
    return str(error.message)


@asynccontextmanager
async def _api() -> AsyncIterator[Any]:
    from dljob.controller.connection import connect
    from dljob.kube import Api

    connection = connect()
    async with connection.session() as session:
        yield Api(session, connection.server)


def default_namespace() -> str:
    """The namespace of the kubeconfig's current context. Raises BadInputError where there is no usable one."""
    from dljob.controller.connection import connect

    try:
        return connect().info.default_namespace or "default"
    except ValueError as error:
        raise BadInputError(str(error)) from None


async def observe(api: Any) -> tuple[ClusterView, dict[tuple[str, str], Any]]:
    """The cluster as it is, and what profiles know; without profiles where they may not be read."""
    from dljob.kube import ApiError, cluster_view
    from dljob.kube.kinds import NODE, POD, PROFILE
    from dljob.kube.trim import node

    active = "status.phase!=Succeeded,status.phase!=Failed"
    nodes, pods = await asyncio.gather(api.find(NODE, None), api.find(POD, None, fieldSelector=active))
    try:
        profiles = await api.find(PROFILE, None)
    except ApiError as error:
        if error.code not in (403, 404):
            raise
        profiles = []
    return cluster_view([node(body) for body in nodes], pods), parse_profiles(profiles)
