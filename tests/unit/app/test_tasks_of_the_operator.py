"""Tests that the operator ends when one of its tasks ends, in whatever way: its Deployment then starts it again.

The real operator runs against an API server in memory. Its tasks are found while it runs, so a new task is tested too.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest

import dljob
from dljob.app import main
from dljob.app.main import BLOCKED_S, Operator
from dljob.app.settings import Settings
from dljob.controller import tasks
from dljob.controller.controller import Controller
from dljob.controller.planning.process import PlannerProcess
from dljob.controller.tasks import TaskEndedError
from dljob.controller.watches import watches
from dljob.kube import ApiError, JobKey
from dljob.kube.background import BackgroundLoop
from dljob.kube.kinds import DLJOB, VOLUME, Kind
from dljob.kube.leader import Leader
from support.manifests.watched import dljob as dljob_body
from support.servers.http_api import HttpApiServer
from support.virtual_time import run

CODE = str(Path(dljob.__file__).parent)
WITHIN_S = 120.0
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

        async def stopped(
            watching: watches.Watches, identity: str, stop: asyncio.Event, end: Callable[[], Any]
        ) -> None:
            watching._jobs_listed(None, (), None)
            await stop.wait()
            await end()

        for module in (main, watches):
            monkeypatch.setattr(module, "run_until_one_ends", observed)
        monkeypatch.setattr(PlannerProcess, "start", nothing)
        monkeypatch.setattr(watches.Watches, "run", stopped)
        self.background: list[BackgroundLoop] = []

        def background(name: str) -> BackgroundLoop:
            self.background.append(BackgroundLoop(name))
            return self.background[-1]

        monkeypatch.setattr(main, "BackgroundLoop", background)
        self._monkeypatch = monkeypatch

    def lease_task(self) -> asyncio.Task[Any] | None:
        """Return the task that renews the Lease, in its own event loop. It is the last that the operator starts."""
        tasks = own_tasks(self.background[-1]._loop) if self.background else {}
        return next((task for name, task in tasks.items() if name.endswith("hold")), None)

    async def run(self, then: Callable[[Operator], None] = lambda _: None) -> Exception | None:
        """Run the operator until it ends. Call ``then`` when it leads. Return its error."""
        async with HttpApiServer() as server:
            self._monkeypatch.setattr(main, "connect", lambda: Connection(server.url))
            self.background.clear()
            self.operator = operator = Operator(replace(Settings.of(ENV), metrics_port=0))
            running = asyncio.create_task(operator.run(), name="the test")
            try:
                async with asyncio.timeout(WITHIN_S):
                    while not (running.done() or self.ends or self.lease_task() is not None):
                        await asyncio.sleep(0.005)
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


def test_operator_that_waits_for_the_api_server_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: after a minute, the liveness probe said that the event loop was blocked. A restart does not help."""
    operator, later_s = Operator(Settings.of(ENV)), monotonic() + 2 * BLOCKED_S
    monkeypatch.setattr(main, "monotonic", lambda: later_s)
    assert operator._ill() is None and operator._not_ready() == "waiting for the API server"


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        ("pod_group_api", "waiting for the API server to say if it serves PodGroups"),
        ("provisioning_api", "waiting for the API server to say if it serves ProvisioningRequests"),
        ("PlanKeySecret.load", "waiting for Secret default/dljob-operator-plan-key"),
    ],
)
def test_readiness_names_what_the_start_waits_for(
    started: Started, monkeypatch: pytest.MonkeyPatch, wait: str, expected: str
) -> None:
    """Fixed bug: with an API server that could not read Secrets, the probe named a CustomResourceDefinition."""

    async def fails_at_last(*_: object) -> None:
        raise DefectError

    owner, _, name = wait.rpartition(".")
    monkeypatch.setattr(getattr(main, owner) if owner else main, name, fails_at_last)
    assert isinstance(asyncio.run(started.run()), DefectError)
    message = started.operator._not_ready()
    assert message is not None and message.startswith(expected)


def test_operator_that_does_not_lead_queues_no_jobs_and_then_all_that_exist(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: a replica that did not lead kept the name of each job, also of all that were deleted meanwhile."""
    depths, processed, acquire = list[int](), list[JobKey](), Leader.acquire

    async def acquired(leader: Leader) -> None:
        operator = started.operator
        for i in range(10):
            operator._queue.add(("team", f"deleted-{i}"))
        operator._cache.put(DLJOB, dljob_body())
        depths.append(len(operator._queue))
        await acquire(leader)

    async def process(_: Controller, key: JobKey) -> None:
        processed.append(key)
        started.operator._stop.set()

    monkeypatch.setattr(Leader, "acquire", acquired)
    monkeypatch.setattr(Controller, "process", process)
    assert asyncio.run(started.run()) is None
    assert (depths, processed) == ([0], [("ns", "digits")])
    started.operator._queue.add(("ns", "digits"))
    assert len(started.operator._queue) == 0, "it no longer leads"


def test_blocked_event_loop_is_noticed(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []

    def look(operator: Operator) -> None:
        later_s = monotonic() + 2 * BLOCKED_S
        found.append(operator._ill())
        monkeypatch.setattr(main, "monotonic", lambda: later_s)
        found.append(operator._ill())
        operator._stop.set()

    asyncio.run(started.run(look))
    assert found[0] is None and found[1] is not None and "blocked" in found[1]


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


def test_lease_task_that_is_cancelled_in_its_thread_ends_the_operator(started: Started) -> None:
    """The Lease is renewed in an event loop of its own, so that planning does not delay it."""

    def cancel(_: Operator) -> None:
        task = started.lease_task()
        assert task is not None
        task.get_loop().call_soon_threadsafe(task.cancel)

    found = asyncio.run(started.run(cancel))
    assert isinstance(found, TaskEndedError) and "Lease" in str(found)


@pytest.mark.parametrize(("code", "lines"), [(403, 0), (500, 6)])
def test_resync_leaves_a_missing_permission_to_the_watch_that_logs_it(
    code: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The resync logged a further warning every ten minutes."""

    class Refused:
        async def prune(self, kind: Kind, _: str) -> list[JobKey]:
            if kind is VOLUME:
                raise ApiError(code, "Forbidden", "cannot list persistentvolumes")
            return []

        async def expire_profiles(self, _: datetime) -> None:
            """No profile has expired."""

    class Idle:
        async def refresh(self) -> None:
            """The key stays the same."""

        async def tidy(self, _: datetime) -> None:
            """No record has expired."""

    async def body() -> None:
        others: Any = Idle()
        kube: Any = Refused()
        operator = Operator(replace(Settings.of(ENV), metrics_port=0))
        task = asyncio.create_task(operator._resync(kube, others, others))
        await asyncio.sleep(3650)
        task.cancel()

    run(body())
    assert len([each for each in caplog.records if "persistentvolumes" in each.getMessage()]) == lines
