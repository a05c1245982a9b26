"""Run a command's requests to the cluster of its options ``--context`` and ``--kubeconfig``, or of the kubeconfig."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any, TypeVar

from dljob.client import access
from dljob.client.access import PATIENCE_S
from dljob.client.errors import BadInputError

T = TypeVar("T")
PAUSE_S = 0.5
"""Seconds between two requests to an API server that does not answer."""
_selected: ContextVar[tuple[str | None, str | None]] = ContextVar("_selected", default=(None, None))
"""The kubeconfig and the context of the command that runs, as ``access.connection`` takes them."""


def add_cluster(command: argparse.ArgumentParser) -> None:
    """Add the options ``--context`` and ``--kubeconfig``, which choose the cluster of the command."""
    command.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current context)")
    command.add_argument(
        "--kubeconfig", metavar="FILE", help="kubeconfig (default: the value of KUBECONFIG, or ~/.kube/config)"
    )


def cluster_options(given: argparse.Namespace) -> dict[str, str]:
    """Return option → value of the options that the user has set of those that choose a cluster."""
    found = {f"--{name}": getattr(given, name, None) for name in ("context", "kubeconfig")}
    return {name: value for name, value in found.items() if value}


@contextmanager
def cluster_of(given: argparse.Namespace) -> Iterator[None]:
    """Let requests go to the cluster that the options of a command choose."""
    options = cluster_options(given)
    before = _selected.set((options.get("--kubeconfig"), options.get("--context")))
    try:
        yield
    finally:
        _selected.reset(before)


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
    async with access.opened(access.connection(*_selected.get())) as api:
        yield api


def default_namespace() -> str:
    """Return the namespace of the kubeconfig's context, or ``default`` if the context names none.

    Raise BadInputError without a usable kubeconfig, or if the operator's dependencies are not installed.
    """
    return access.connection(*_selected.get(), with_plugin=False).info.default_namespace or "default"
