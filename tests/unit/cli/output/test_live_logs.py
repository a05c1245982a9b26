"""Tests of ``dljob logs`` while a job runs: the logs of all its pods, across restarts and broken connections."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

from dljob.cli import main
from dljob.client.output import live_logs
from dljob.client.output.live_logs import Following, Line, Run, printed, runs_of, started
from dljob.kube import Api, ApiError
from dljob.kube.kinds import DLJOB, POD
from support.servers.http_api import HttpApiServer

WITHIN_S = 30.0
Step = Callable[["Watched"], Awaitable[None]]


def pod(name: str, *, running: bool = True, restarts: int = 0, uid: str = "") -> dict[str, Any]:
    state = {"running": {}} if running else {"terminated": {"exitCode": 0}}
    sidecar = {"name": "agent", "state": {"running": {}}}
    status = {"containerStatuses": [sidecar, {"name": "trainer", "restartCount": restarts, "state": state}]}
    return {"metadata": {"name": name, "namespace": "a", "uid": uid or name}, "status": status}


class Watched:
    """A job of two pods, and the lines that a follower has printed of it."""

    def __init__(self, server: HttpApiServer, tail: int | None) -> None:
        self.server, self._tail = server, tail
        self.lines: list[str] = []
        self.said: list[str] = []
        self.phase("Running")
        for name in ("j-t4-0", "j-t4-1"):
            server.put(POD, pod(name))

    def phase(self, phase: str) -> None:
        self.server.put(DLJOB, {"metadata": {"name": "j", "namespace": "a"}, "spec": {}, "status": {"phase": phase}})

    async def until(self, *expected: str) -> None:
        """Wait until exactly these lines, in any order, were printed."""
        async with asyncio.timeout(WITHIN_S):
            while sorted(self.lines) != sorted(expected):
                await asyncio.sleep(0.01)

    async def follow(self) -> None:
        async with aiohttp.ClientSession() as session:
            following = Following(Api(session, self.server.url), "a", "j", self._tail, self.said.append)
            async with aclosing(following.lines()) as lines:
                async for line in lines:
                    self.lines.append(line.text)


def followed(step: Step, tail: int | None = None) -> Watched:
    """Follow a job while ``step`` changes it and then ends it. Return what was printed."""

    async def body() -> Watched:
        async with HttpApiServer() as server:
            watched = Watched(server, tail)
            async with asyncio.timeout(2 * WITHIN_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(watched.follow())
                await step(watched)
                watched.phase("Complete")
                for name in server.logs.opened:
                    await server.logs.end(name)
            return watched

    return asyncio.run(body())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_logs, "POLL_S", 0.01)


def test_lines_of_all_pods_are_printed_as_they_come_until_the_job_has_ended() -> None:
    async def step(job: Watched) -> None:
        await job.server.logs.write("j-t4-0", "[rank 0] one")
        await job.until("[rank 0] one")
        await job.server.logs.write("j-t4-1", "[rank 1] one")
        await job.server.logs.write("j-t4-0", "[rank 0] two")
        await job.until("[rank 0] one", "[rank 0] two", "[rank 1] one")
        await job.server.logs.write("j-t4-1", "[rank 1] the end")

    job = followed(step)
    assert sorted(job.lines) == ["[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] the end"]
    assert job.said == ["phase Running", "phase Complete"]


def test_no_line_is_lost_or_repeated_if_a_connection_breaks() -> None:
    """Eight lines have times in two seconds, and the API server knows only seconds."""

    async def step(job: Watched) -> None:
        texts = [f"line {n}" for n in range(8)]
        await job.server.logs.write("j-t4-0", *texts[:6])
        await job.until(*texts[:6])
        await job.server.logs.cut("j-t4-0")
        opened = job.server.logs.opened["j-t4-0"]
        async with asyncio.timeout(WITHIN_S):
            while len(opened) < 2:
                await asyncio.sleep(0.01)
        assert opened[1]["sinceTime"] == "2026-01-01T00:00:01Z"
        await job.server.logs.write("j-t4-0", *texts[6:])
        await job.until(*texts)

    assert len(followed(step).lines) == 8


def test_new_pods_and_restarted_containers_are_followed() -> None:
    async def step(job: Watched) -> None:
        await job.server.logs.write("j-t4-0", "first")
        await job.until("first")
        await job.server.logs.end("j-t4-0")
        job.server.delete(POD, "a", "j-t4-0")
        await job.server.logs.write("j-a100-0", "on another device")
        job.server.put(POD, pod("j-a100-0"))
        await job.until("first", "on another device")
        await job.server.logs.write("j-a100-0", "after a restart of the container")
        job.server.put(POD, pod("j-a100-0", restarts=1))
        await job.until("first", "on another device", "on another device", *2 * ["after a restart of the container"])

    followed(step)


def test_following_begins_with_the_last_lines() -> None:
    async def step(job: Watched) -> None:
        await job.until("three")
        await job.server.logs.write("j-t4-0", "four")
        await job.until("three", "four")

    async def body(job: Watched) -> None:
        await step(job)

    async def main() -> list[str]:
        async with HttpApiServer() as server:
            await server.logs.write("j-t4-0", "one", "two", "three")
            watched = Watched(server, 1)
            async with asyncio.timeout(2 * WITHIN_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(watched.follow())
                await body(watched)
                server.delete(DLJOB, "a", "j")
                await server.logs.end("j-t4-0")
            return watched.said

    assert asyncio.run(main()) == ["phase Running", "the job was deleted"]


def test_a_reader_that_stops_is_not_held_up_by_lines_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: ``dljob logs -f JOB | head`` did not end if more lines waited than fit in the queue."""
    monkeypatch.setattr(live_logs, "MAX_WAITING", 2)

    async def main() -> None:
        async with HttpApiServer() as server, aiohttp.ClientSession() as session, asyncio.timeout(WITHIN_S):
            Watched(server, None)
            await server.logs.write("j-t4-0", *(f"line {n}" for n in range(20)))
            server.put(DLJOB, {"metadata": {"name": "j", "namespace": "a"}, "status": {"phase": "Complete"}})
            following = Following(Api(session, server.url), "a", "j", None)
            async with aclosing(following.lines()) as lines:
                assert (await anext(lines)).text == "line 0"
                while not following._lines.full():
                    await asyncio.sleep(0.01)
            await server.logs.end("j-t4-0")

    asyncio.run(main())


def test_permission_that_is_missing_is_named() -> None:
    async def main() -> None:
        async with HttpApiServer() as server:
            server.logs.denied = True
            await Watched(server, None).follow()

    with pytest.raises(ApiError, match="logs of pod j-t4-0 are denied; expected the permission to get pods/log"):
        asyncio.run(main())


def test_logs_so_far_are_printed_one_pod_after_another() -> None:
    async def main() -> list[Line]:
        async with HttpApiServer() as server, aiohttp.ClientSession() as session:
            api = Api(session, server.url)
            for number in (10, 9):
                server.put(POD, pod(f"j-t4-{number}", running=number == 9))
                await server.logs.write(f"j-t4-{number}", "[rank 0] a", "[agent] b", "[rank 10] c")
            server.put(POD, {"metadata": {"name": "j-t4-11", "namespace": "a"}, "status": {"phase": "Pending"}})
            return [line async for line in printed(api, "a", await started(api, "a", "j"), 2)]

    found = asyncio.run(main())
    assert [(line.pod, line.text) for line in found] == [
        ("j-t4-9", "[agent] b"), ("j-t4-9", "[rank 10] c"), ("j-t4-10", "[agent] b"), ("j-t4-10", "[rank 10] c"),
    ]  # fmt: skip
    assert [line.shown(None) for line in found[:2]] == ["[agent j-t4-9] b", "[rank 10] c"]
    assert [line.shown(1) for line in found] == 4 * [None]
    assert [line.shown(10) for line in found] == [None, "c", None, "c"]


def test_runs_of_a_container_are_told_apart() -> None:
    again = pod("j-t4-0", restarts=2, uid="u")
    assert runs_of([again, {"metadata": {"name": "x"}}]) == {Run("j-t4-0", "u", 2): True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--rank", "-1"], "--rank: found -1; expected 0 or more"),
        (["--tail", "-1"], "--tail: found -1; expected 0 or more lines"),
        (["-p", "-f"], "--previous: found it with --follow or --tail; expected it alone"),
    ],
)
def test_wrong_options_are_named(given: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "digits", *given]) == 2
    assert expected in capsys.readouterr().err
