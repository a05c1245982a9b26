"""A procedure that waits for conditions, and the event queue that feeds it.

Callbacks only put events into the queue and decide nothing. ``_take`` records each event, and the procedure checks its
conditions on that record.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from dlcontract import Plan
from dltrain.agent.coordinator.links import LinkEvent

TICK_S = 0.5
Event = LinkEvent | Plan | None
"""None: check the condition again."""


class ReplannedError(Exception):
    """A plan with another digest arrived."""


class LeavingError(Exception):
    """This pod received SIGTERM."""


class Procedure(ABC):
    """Base of the coordinator. A new plan or a request to leave raises an exception where the procedure waits."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._leaving = False
        self._new_plan: Plan | None = None
        self._ticked_s = 0.0
        self.done = asyncio.Event()
        """Set once the procedure has ended."""

    @abstractmethod
    def _take(self, event: Event) -> None:
        """Record an event."""

    @abstractmethod
    def _tick(self) -> None:
        """Check time limits. Called every ``TICK_S``."""

    def replan(self, plan: Plan) -> None:
        """Pass on a newer plan, which the agent of this pod has received."""
        self._events.put_nowait(plan)

    def leave(self) -> None:
        """End the procedure, because this pod received SIGTERM."""
        self._leaving = True
        self._events.put_nowait(None)

    async def _until(
        self, condition: Callable[[], bool], within_s: float | None = None, *, interruptible: bool = True
    ) -> bool:
        """Process events until the condition holds (return True) or the time is over (return False).

        Raise LeavingError and ReplannedError if ``interruptible``, and at any time the errors of ``_take``.
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
