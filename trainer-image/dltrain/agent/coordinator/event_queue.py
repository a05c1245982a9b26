"""The queue of events, such as messages of pods and new plans, for which the coordinator waits.

Callbacks of connections and processes only put events into the queue and decide nothing. ``EventQueue.until`` passes
each event to a function that records it, and then checks the condition for which the coordinator waits.
"""

import asyncio
import time
from collections.abc import Callable

from dlcontract import Plan
from dltrain.agent.coordinator.links import LinkEvent

TICK_S = 0.5
Event = LinkEvent | Plan | None
"""An event of the connection to a pod, a new plan, or None.

None has no content: it only makes ``EventQueue.until`` check its condition again."""


class ReplannedError(Exception):
    """A new plan of this job arrived that changes how it trains, for example its nodes or batch sizes.

    All ranks must therefore stop and start again.
    """


class LeavingError(Exception):
    """This pod received SIGTERM, so the coordinator in this pod must stop."""


class EventQueue:
    """The coordinator's events in order of arrival. A new plan or SIGTERM interrupts a wait in ``until``."""

    def __init__(self, record: Callable[[Event], None], tick: Callable[[], None]) -> None:
        """Create the queue. ``record``: called by ``until`` with each event, to store its content.

        ``tick``: called about every ``TICK_S`` seconds while ``until`` waits, to check time limits.
        """
        self._record, self._tick = record, tick
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._leaving = False
        self.new_plan: Plan | None = None
        """A plan that changes how the job trains, and that the coordinator has not adopted yet; None: no such plan.

        While it is set, interruptible waits in ``until`` raise ReplannedError.
        """
        self._ticked_s = 0.0

    def put(self, event: Event) -> None:
        """Append an event to the queue. Do not wait: ``until`` processes the event later."""
        self._events.put_nowait(event)

    def leave(self) -> None:
        """Make every interruptible wait in ``until`` raise LeavingError, because this pod received SIGTERM."""
        self._leaving = True
        self._events.put_nowait(None)

    async def until(
        self, condition: Callable[[], bool], within_s: float | None = None, *, interruptible: bool = True
    ) -> bool:
        """Process events until the condition holds or ``within_s`` seconds have passed. Return True if it holds.

        If ``within_s`` is None, wait without a limit. If ``interruptible``, raise LeavingError when this pod must
        leave, and ReplannedError when a new plan has arrived. Also raise the errors of ``record``.
        """
        deadline_s = None if within_s is None else time.monotonic() + within_s
        while True:
            if interruptible and self._leaving:
                raise LeavingError
            if interruptible and self.new_plan is not None:
                raise ReplannedError
            if condition():
                return True
            left_s = TICK_S if deadline_s is None else min(TICK_S, deadline_s - time.monotonic())
            if left_s <= 0:
                return False
            try:
                async with asyncio.timeout(left_s):
                    self._record(await self._events.get())
            except TimeoutError:
                pass
            while not self._events.empty():
                self._record(self._events.get_nowait())
            if time.monotonic() - self._ticked_s >= TICK_S:
                self._ticked_s = time.monotonic()
                self._tick()
