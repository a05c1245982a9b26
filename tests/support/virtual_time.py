"""An event loop whose clock jumps to the next event, so that waiting takes no time and the order stays the same.

Code in it must not wait for sockets. What it gives to another thread runs at once, in the thread of the loop.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "deadlock: every task waits and no event is scheduled"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits the future gets it
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like ``asyncio.run``, without waiting. The clock starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(main)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def within(seconds: float, awaited: Any) -> bool:
    """Return True if it ends in time. Cancel it otherwise."""
    try:
        await asyncio.wait_for(awaited, seconds)
    except TimeoutError:
        return False
    return True
