"""Tests that the operator ends when one of its tasks ends, in whatever way: its Deployment then starts it again.

The real operator runs against an API server in memory. Its tasks are found while it runs, so a new task is tested too.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import dljob
from dljob.app import main
from dljob.app.main import Operator
from dljob.app.settings import Settings
from dljob.controller import tasks, watches
from dljob.controller.planning.process import PlannerProcess
from dljob.controller.tasks import TaskEndedError
from support.http_api_server import HttpApiServer

CODE = str(Path(dljob.__file__).parent)
WITHIN_S = 20.0
ENV = {"DLJOB_TRAINER_IMAGE": "example.invalid/trainer", "DLJOB_POD_NAME": "one", "DLJOB_CONCURRENCY": "2"}
Tasks = Mapping[str, Coroutine[Any, Any, Any]]


@dataclass
class Connection:
    server: str

    def session(self, responses: type[aiohttp.ClientResponse] = aiohttp.ClientResponse) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(response_class=responses)


class Started:
    """Runs operators. ``names``: their tasks. ``ends``: coroutines that run in place of some of them, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.ends: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {}
        genuine = tasks.run_until_one_ends

        async def observed(wanted: Tasks) -> None:
            self.names += wanted
            for name in wanted.keys() & self.ends.keys():
                _close(wanted[name])
            await genuine({name: self.ends[name]() if name in self.ends else each for name, each in wanted.items()})

        async def nothing(*_: object) -> None:
            """kopf and the planner's process are slow to start, and are tested by themselves."""

        async def stopped(_: object, identity: str, stop: asyncio.Event, end: Callable[[], Any]) -> None:
            await stop.wait()
            await end()

        for module in (main, watches):
            monkeypatch.setattr(module, "run_until_one_ends", observed)
        monkeypatch.setattr(PlannerProcess, "start", nothing)
        monkeypatch.setattr(watches.Watches, "run", stopped)
        self._monkeypatch = monkeypatch

    async def run(self, then: Callable[[Operator], None] = lambda _: None) -> Exception | None:
        """Run the operator until it ends. Call ``then`` when it leads. Return its error."""
        async with HttpApiServer() as server:
            self._monkeypatch.setattr(main, "connect", lambda: Connection(server.url))
            self.operator = operator = Operator(replace(Settings.of(ENV), metrics_port=0))
            running = asyncio.create_task(operator.run(), name="the test")
            try:
                async with asyncio.timeout(WITHIN_S):
                    while not (running.done() or self.ends or (operator._leader and operator._leader.leads())):
                        await asyncio.sleep(0.005)
                    await asyncio.sleep(0.02)  # All tasks have begun.
                    then(operator)
                    await running
            except TimeoutError:
                raise AssertionError("the operator goes on") from None
            except Exception as error:  # noqa: BLE001 - it is the result
                return error
        return None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    yield Started(monkeypatch)


def _close(unused: Coroutine[Any, Any, Any]) -> None:
    """Close a coroutine that does not run, and the coroutines among its arguments."""
    for argument in unused.cr_frame.f_locals.values():
        if asyncio.iscoroutine(argument):
            argument.close()
    unused.close()


def own_tasks(loop: asyncio.AbstractEventLoop | None = None) -> dict[str, asyncio.Task[Any]]:
    """Return the tasks of a loop whose code is the operator's, by name."""
    found = {}
    for task in asyncio.all_tasks(loop):
        code = getattr(task.get_coro(), "cr_code", None)
        own = code is not None and code.co_filename.startswith(CODE) and task.get_name() != "the test"
        if own or task.get_name() == "tasks":  # The test has wrapped the coroutine of this one.
            found[f"{task.get_name()}: {code.co_name}"] = task
    return found


def test_operator_ends_without_an_error_when_it_is_stopped(started: Started) -> None:
    assert asyncio.run(started.run(lambda operator: operator._stop.set())) is None
    assert {"heartbeat", "work", "watches", "resync", "Kueue", "planning", "worker 1", "Lease"} <= set(started.names)
    assert {"watch of pods", "check of DLJobs"} <= set(started.names)


def test_each_task_of_the_operator_is_supervised(started: Started) -> None:
    """A task that nobody awaits could end unnoticed."""
    found: list[str] = []

    def look(operator: Operator) -> None:
        found.extend(task.get_name() for task in own_tasks().values())
        operator._stop.set()

    asyncio.run(started.run(look))
    assert sorted(found) == sorted([*started.names, "tasks"])


class DefectError(Exception):
    pass


async def fails() -> None:
    raise DefectError("a defect")


async def returns() -> None:
    pass


@pytest.mark.parametrize(("end", "error"), [(fails, DefectError), (returns, TaskEndedError)])
def test_task_that_fails_or_returns_ends_the_operator(
    started: Started, end: Callable[[], Coroutine[Any, Any, None]], error: type[Exception]
) -> None:
    asyncio.run(started.run(lambda operator: operator._stop.set()))
    for name in dict.fromkeys(started.names):
        started.ends = {name: end}
        found = asyncio.run(started.run())
        assert isinstance(found, error), name
        assert started.operator._ill() == str(found) and started.operator._not_ready(), name
        assert error is DefectError or name in str(found)


def test_task_that_is_cancelled_ends_the_operator(started: Started) -> None:
    names: list[str] = []

    def look(operator: Operator) -> None:
        names.extend(own_tasks())
        operator._stop.set()

    asyncio.run(started.run(look))
    assert len(names) > 15
    for name in names:

        def cancel(_: Operator, name: str = name) -> None:
            own_tasks()[name].cancel()

        found = asyncio.run(started.run(cancel))
        assert isinstance(found, TaskEndedError), name
        assert started.operator._ill() == str(found), name


def test_lease_task_that_is_cancelled_in_its_thread_ends_the_operator(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Lease is renewed in an event loop of its own, so that planning does not delay it."""
    made: list[Any] = []
    genuine = main.BackgroundLoop
    monkeypatch.setattr(main, "BackgroundLoop", lambda name: made.append(genuine(name)) or made[-1])

    def cancel(_: Operator) -> None:
        loop = made[0]._loop
        [task] = [task for name, task in own_tasks(loop).items() if name.endswith("hold")]
        loop.call_soon_threadsafe(task.cancel)

    found = asyncio.run(started.run(cancel))
    assert isinstance(found, TaskEndedError) and "Lease" in str(found)
