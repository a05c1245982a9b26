"""Tasks of asyncio that run in the background. asyncio itself keeps only weak references to them."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Tasks(Generic[T]):
    """The tasks of one owner that have not ended yet, kept alive until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[T]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start ``work`` and return its task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def __iter__(self) -> Iterator[asyncio.Task[T]]:
        return iter(list(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)
