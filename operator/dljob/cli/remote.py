"""Run a command's requests to the current cluster, that of the kubeconfig."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dljob.client import access
from dljob.client.errors import BadInputError

T = TypeVar("T")


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
    error, if ``work`` raises a ValueError, or if the operator's dependencies are not installed.
    """
    try:
        from dljob.kube import ApiError
    except ImportError as error:
        raise access.missing_package(error) from None

    async def connected() -> T:
        async with _api() as api:
            return await work(api)

    try:
        return asyncio.run(connected())
    except ApiError as error:
        raise BadInputError(access.in_words(error)) from None
    except ValueError as error:
        raise BadInputError(str(error)) from None


@asynccontextmanager
async def _api() -> AsyncIterator[Any]:
    async with access.opened(access.connection()) as api:
        yield api


def default_namespace() -> str:
    """Return the namespace of the kubeconfig's current context, or ``default`` if the context names none.

    Raise BadInputError without a usable kubeconfig, or if the operator's dependencies are not installed.
    """
    return access.connection().info.default_namespace or "default"
