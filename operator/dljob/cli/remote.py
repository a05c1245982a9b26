"""Run a command's requests to the current cluster, that of the kubeconfig."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, TypeVar

from dljob.client import access
from dljob.client.access import PATIENCE_S
from dljob.client.errors import BadInputError

T = TypeVar("T")
PAUSE_S = 0.5
"""Seconds between two requests to an API server that does not answer."""


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


async def patiently(request: Callable[[], Awaitable[T]], meanwhile: str) -> T:
    """Return the result of ``request()``. Repeat it for up to ``PATIENCE_S`` if the API server does not answer.

    The API server also does not answer while it restarts. ``meanwhile``: the end of the sentence that says so to the
    user. Raise ApiError for other errors, and if the server never answers.
    """
    from dljob.kube import ApiError
    from dljob.kube.watch.reflector import TEMPORARY

    began_s, said = monotonic(), False
    while True:
        try:
            return await request()
        except ApiError as error:
            if error.code not in TEMPORARY or monotonic() - began_s > PATIENCE_S:
                raise
            if not said:
                print(f"dljob: the API server does not answer ({error.message}); {meanwhile}", file=sys.stderr)
            said = True
        await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def _api() -> AsyncIterator[Any]:
    async with access.opened(access.connection()) as api:
        yield api


def default_namespace() -> str:
    """Return the namespace of the kubeconfig's current context, or ``default`` if the context names none.

    Raise BadInputError without a usable kubeconfig, or if the operator's dependencies are not installed.
    """
    return access.connection().info.default_namespace or "default"
