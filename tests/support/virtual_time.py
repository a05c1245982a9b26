"""An event loop whose clock jumps to whatever comes next: hours of waiting pass in no time, and in the same order.

Nothing that waits for the outside (sockets, threads) may run in it.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits, and nothing will ever happen"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """What ``asyncio.run`` would return, without the waiting; the clock starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(main)


def now_s() -> float:
    return asyncio.get_running_loop().time()
