"""Read the state of the current cluster (that of the kubeconfig) with the operator's code."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dljob.cli.defaults import OperatorPod, operator_pods
from dljob.cli.errors import BadInputError
from dljob.cluster import ClusterView
from dljob.job.plan.recommendation import parse_profiles

T = TypeVar("T")
FIELD_OWNER = "kubectl-dljob"


def add_namespace(command: argparse.ArgumentParser, before: str = "") -> None:
    """Add the option ``--namespace``, whose default is the namespace of the kubeconfig.

    ``before``: text for the help that names another source of the default, which takes precedence.
    """
    command.add_argument(
        "-n", "--namespace", metavar="NAME", help=f"namespace (default: that of {before}the kubeconfig, or 'default')"
    )


def reach(work: Callable[[Any], Awaitable[T]]) -> T:
    """Connect to the API server of the kubeconfig, run ``work(api)``, and return its result.

    ``api``: a client of type ``dljob.kube.Api``. Raise BadInputError if the server cannot be reached or answers with an
    error, if ``work`` raises a ValueError, or if the operator's dependencies are not installed. The functions of this
    module import these dependencies only when they need them, so that planning from files works without them.
    """
    try:
        from dljob.kube import ApiError
    except ImportError as error:
        raise _without(error) from None

    async def connected() -> T:
        async with _api() as api:
            return await work(api)

    try:
        return asyncio.run(connected())
    except ApiError as error:
        raise BadInputError(_in_words(error)) from None
    except ValueError as error:
        raise BadInputError(str(error)) from None


def _without(error: ImportError) -> BadInputError:
    return BadInputError(
        f"current cluster: found no Python package {error.name}, which dljob needs to read the cluster; expected this "
        "package. Run pip install './operator[operator]' in a clone of dljob, or use --cluster FILE where a command "
        "has it"
    )


def _in_words(error: Any) -> str:
    if error.code == 0:
        return f"the API server does not answer: {error.message}. Check KUBECONFIG and the cluster"
    if error.code == 401:
        return "the API server rejected the credentials. Check KUBECONFIG"
    if error.not_found and ("requested resource" in error.message or "page not found" in error.message):
        return "the cluster has no DLJob resource. Install dljob first (helm install dljob charts/dljob)"
    return str(error.message)


@asynccontextmanager
async def _api() -> AsyncIterator[Any]:
    from dljob.controller.connection import connect
    from dljob.kube import Api

    connection = connect()
    async with connection.session() as session:
        yield Api(session, connection.server)


def default_namespace() -> str:
    """Return the namespace of the kubeconfig's current context, or ``default`` if the context names none.

    Raise BadInputError without a usable kubeconfig, or if the operator's dependencies are not installed.
    """
    try:
        from dljob.controller.connection import connect
    except ImportError as error:
        raise _without(error) from None
    try:
        return connect().info.default_namespace or "default"
    except ValueError as error:
        raise BadInputError(str(error)) from None


async def observe(api: Any) -> tuple[ClusterView, dict[tuple[str, str], Any], tuple[OperatorPod, ...]]:
    """Return the nodes with their free resources, the profiles and the pods of operators of the current cluster.

    Profiles are a mapping (model, device type) → measured constants. It is empty if the user may not read profiles, or
    if the cluster has no DLProfile resource.
    """
    from dljob.kube import ApiError, cluster_view
    from dljob.kube.kinds import NODE, POD, PROFILE
    from dljob.kube.objects.trim import node

    active = "status.phase!=Succeeded,status.phase!=Failed"
    nodes, pods = await asyncio.gather(api.find(NODE, None), api.find(POD, None, fieldSelector=active))
    try:
        profiles = await api.find(PROFILE, None)
    except ApiError as error:
        if error.code not in (403, 404):
            raise
        profiles = []
    return cluster_view([node(body) for body in nodes], pods), parse_profiles(profiles), operator_pods(pods)
