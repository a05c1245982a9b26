"""One queue of events, and a procedure that waits on conditions over what they told.

There is one thread of events and no callback decides anything: whatever happens is queued, ``take`` notes it, and the
procedure looks at the notes.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from dlcontract import Plan
from dltrain.agent.coordinator.links import LinkEvent

TICK_S = 0.5
Event = LinkEvent | Plan | None
"""None: look again, something was set."""


class ReplannedError(Exception):
    """A plan with another digest arrived."""


class LeavingError(Exception):
    """This pod was told to stop."""


class Procedure(ABC):
    """What interrupts it (a new plan, the wish to stop) is raised where it waits."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._leaving = False
        self._new_plan: Plan | None = None
        self._ticked_s = 0.0
        self.done = asyncio.Event()
        """Set when the procedure has come to its end."""

    @abstractmethod
    def _take(self, event: Event) -> None:
        """Note what happened."""

    @abstractmethod
    def _tick(self) -> None:
        """Every ``TICK_S``, for what is noticed by time alone."""

    def replan(self, plan: Plan) -> None:
        """A newer plan: from its own pod's agent, which watches."""
        self._events.put_nowait(plan)

    def leave(self) -> None:
        """This pod was told to stop: wind up."""
        self._leaving = True
        self._events.put_nowait(None)

    async def _until(
        self, condition: Callable[[], bool], within_s: float | None = None, *, interruptible: bool = True
    ) -> bool:
        """Take in events until the condition holds (True) or the time is over (False).

        Raises LeavingError and ReplannedError where interruptible, and what ``_take`` raises at any time.
        """
        deadline_s = None if within_s is None else time.monotonic() + within_s
        while True:
            if interruptible and self._leaving:
                raise LeavingError
            if interruptible and self._new_plan is not None:
                raise ReplannedError
            if condition():
                return True
            left_s = TICK_S if deadline_s is None else min(TICK_S, deadline_s - time.monotonic())
            if left_s <= 0:
                return False
            try:
                async with asyncio.timeout(left_s):
                    self._take(await self._events.get())
            except TimeoutError:
                pass
            while not self._events.empty():
                self._take(self._events.get_nowait())
            if time.monotonic() - self._ticked_s >= TICK_S:
                self._ticked_s = time.monotonic()
                self._tick()
