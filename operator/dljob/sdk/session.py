"""The connection of a client: an event loop in a thread of its own, and the translation of errors."""

import asyncio
import atexit
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AsyncExitStack, suppress
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from dljob.client import access
from dljob.client.errors import BadInputError, RefusedChangeError
from dljob.job.spec_errors import InvalidSpecError, Problem
from dljob.sdk.errors import DLJobError, InvalidJobError, ServerError

T = TypeVar("T")
INVALID = (400, 422)
"""HTTP status codes with which the API server rejects an object."""


class Session:
    """A connection to the API server, opened for the first request. It may be used from several threads."""

    def __init__(self, kubeconfig: str | None, context: str | None) -> None:
        self._kubeconfig, self._context = kubeconfig, context
        self._lock = Lock()
        self._loop: Any = None
        """A ``dljob.kube.background.BackgroundLoop``, None before the first request."""
        self._api: Any = None
        self._connection: Any = None
        self._stack = AsyncExitStack()
        self._closed = False

    def default_namespace(self) -> str:
        """Return the namespace of the kubeconfig's context or of the pod, or ``default`` if there is none."""
        with self._lock:
            return self._connected().info.default_namespace or "default"

    def call(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Run ``work(api)`` in the event loop of the session, and return its result. Raise DLJobError for its errors.

        ``api``: a client of type ``dljob.kube.Api``.
        """
        self._open()
        from dljob.kube import ApiError

        try:
            result: T = self._loop.call(work(self._api))
        except (ApiError, BadInputError, ValueError) as error:
            raise translated(error) from None
        return result

    def stream(
        self, opened: Callable[[Any], AsyncGenerator[T, None]], timeout_s: float | None = None
    ) -> Generator[T, None, None]:
        """Yield the items of the generator ``opened(api)``, which runs in the event loop of the session.

        Close this generator to end it early. ``timeout_s``: limit from the first request to the last item; None: no
        limit. Raise TimeoutError after it, and DLJobError for errors as ``call`` does.
        """
        deadline = None if timeout_s is None else monotonic() + timeout_s
        source: AsyncGenerator[T, None] | None = None

        async def next_item(api: Any) -> tuple[T, ...]:
            nonlocal source
            source = opened(api) if source is None else source
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - monotonic())):
                try:
                    return (await anext(source),)
                except StopAsyncIteration:
                    return ()

        async def end(_: Any) -> None:
            assert source is not None
            with suppress(RuntimeError):  # After Ctrl-C, the generator may still handle its cancellation.
                await source.aclose()

        try:
            while item := self.call(next_item):
                yield item[0]
        finally:
            if source is not None:
                self.call(end)

    def close(self) -> None:
        """Close the connection. A closed session cannot be opened again."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            atexit.unregister(self.close)
            loop.call(self._stack.aclose())
            loop.__exit__()

    def _connected(self) -> Any:
        if self._closed:
            raise DLJobError("client: found a closed client; expected an open one. Create another Client")
        if self._connection is None:
            try:
                self._connection = access.connection(self._kubeconfig, self._context)
            except BadInputError as error:
                raise DLJobError(str(error)) from None
        return self._connection

    def _open(self) -> None:
        with self._lock:
            connection = self._connected()
            if self._loop is not None:
                return
            from dljob.kube.background import BackgroundLoop

            loop = BackgroundLoop("dljob-sdk")
            loop.__enter__()
            try:
                self._api = loop.call(self._stack.enter_async_context(access.opened(connection)))
            except BadInputError as error:
                loop.__exit__()
                raise translated(error) from None
            self._loop = loop
            atexit.register(self.close)


def translated(error: Exception) -> DLJobError:
    """Return the exception of the SDK for an error of the API server (``ApiError``), or of shared code.

    Shared code raises ValueError for objects on the cluster that it cannot read.
    """
    if isinstance(error, InvalidSpecError):
        return InvalidJobError(error.problems)
    if isinstance(error, RefusedChangeError):
        return InvalidJobError((Problem.of(error.problem),))
    if isinstance(error, BadInputError | ValueError):
        return DLJobError(str(error))
    from dljob.kube import ApiError

    assert isinstance(error, ApiError)
    if error.code in INVALID:
        return InvalidJobError(tuple(Problem.of(text) for text in error.causes or (error.message,)))
    return ServerError(error.code, access.in_words(error))
