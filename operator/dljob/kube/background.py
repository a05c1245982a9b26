"""An event loop in a thread of its own.

In the operator, it renews the Lease, and answers probes and requests for metrics, while the main event loop is busy. In
the SDK, it sends requests for callers that are not asynchronous, also in a notebook, whose event loop runs already.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a thread, to be used in a with statement.

    Entering the context starts the thread. Leaving it cancels the coroutines that still run in the loop, and stops the
    loop.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def __enter__(self) -> "BackgroundLoop":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this loop, and wait for its result in the caller's own event loop.

        If the caller is cancelled, cancel the coroutine.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this loop, and wait for its result in the caller's thread.

        If the wait is interrupted, as by Ctrl-C, cancel the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
