"""Run tasks that must not end. The end of one of them is an error, whether it fails, returns or is cancelled.

Only a signal ends them in order.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn

STOP_S = 20.0
"""Seconds from a signal until the process kills itself if it has not ended. The kubelet kills it after 30 s."""
log = logging.getLogger("dljob")


class TaskEndedError(Exception):
    """A task that must run until the operator stops has returned or was cancelled."""


async def run_until_one_ends(tasks: Mapping[str, Coroutine[Any, Any, Any]]) -> NoReturn:
    """Run coroutines at the same time, each in a task that has its key as the name. None of them may end.

    When one ends, cancel the others, wait until all have ended, and raise its error: its exception, or TaskEndedError
    if it returned or was cancelled. If several end at the same time, the first of them in ``tasks`` decides.
    """
    running = [asyncio.create_task(coroutine, name=name) for name, coroutine in tasks.items()]
    try:
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    raise end_of(next(task for task in running if task in ended))


def end_of(task: asyncio.Task[Any]) -> BaseException:
    """Return the error of a task that has ended and must not: its exception, or TaskEndedError."""
    if not task.cancelled() and (error := task.exception()) is not None:
        return error
    how = "was cancelled" if task.cancelled() else "returned"
    return TaskEndedError(f"task {task.get_name()!r}: found that it {how}; expected it to run until the operator stops")


def stop_on_signals(stop: asyncio.Event) -> None:
    """Let SIGTERM and SIGINT set ``stop`` in place of what they did before. Further signals are logged and ignored.

    They do not end the process at once, because it releases its Lease while it stops: wrappers often send a signal
    twice, and a standby would wait for the end of the Lease. ``STOP_S`` limits the time.
    """
    loop = asyncio.get_running_loop()

    def received(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("%s: the operator is stopping already; SIGKILL ends it at once", number.name)
            return
        log.info("%s: the operator stops", number.name)
        stop.set()
        loop.call_later(STOP_S, _kill)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)


def _kill() -> None:
    log.error("the operator did not stop within %.0f s after a signal; it kills itself", STOP_S)
    os.kill(os.getpid(), signal.SIGKILL)
