"""Tests of an agent's calls of the Kubernetes API, with a local server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dltrain.agent.job import kube_api
from dltrain.agent.job.kube_api import KubeApi

LIMIT_S = 0.2
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@asynccontextmanager
async def serving(answer: bytes, folder: Path, *, closes: bool = False) -> AsyncIterator[KubeApi]:
    """Answer each request with ``answer``. ``closes``: then close the connection; otherwise, the client closes it."""
    (folder / "token").write_text("secret")

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if not closes:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        no_tls: Any = None
        yield KubeApi("127.0.0.1", port, "team-a", folder / "token", no_tls)
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("answer", [b"", HEAD, HEAD + b'{"type": "MODIFIED"}\n'], ids=["none", "head", "event"])
def test_watch_of_a_silent_server_ends(answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_api, "_WATCH_S", 0)
    monkeypatch.setattr(kube_api, "_TIMEOUT_S", LIMIT_S)

    async def main() -> list[Any]:
        events = list[Any]()
        async with serving(answer, tmp_path) as api:
            with pytest.raises(TimeoutError):
                async for event in api.watch("mine-plan", "1"):
                    events.append(event)
        return events

    lines = answer.removeprefix(HEAD).splitlines()
    assert asyncio.run(asyncio.wait_for(main(), 60)) == [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"data": {',
        b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"data": {',
    ],
    ids=["no HTTP", "chunked", "plain"],
)
def test_truncated_answer_is_a_lost_connection(answer: bytes, tmp_path: Path) -> None:
    """Fixed bug: it ended the agent with the exit code of a wrong configuration."""

    async def main() -> None:
        async with serving(answer, tmp_path, closes=True) as api:
            with pytest.raises(ConnectionError, match="API server"):
                await api.get("mine-report")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_end_of_a_watch_does_not_cancel_the_handling_of_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the limit of the watch cancelled the agent while it handled a plan."""
    monkeypatch.setattr(kube_api, "_WATCH_S", 0)
    monkeypatch.setattr(kube_api, "_TIMEOUT_S", LIMIT_S)

    async def main() -> None:
        async with serving(HEAD + b'{"type": "MODIFIED"}\n', tmp_path) as api:
            watch = api.watch("mine-plan", "1")
            assert await anext(watch) == {"type": "MODIFIED"}
            await asyncio.sleep(2 * LIMIT_S)
            with pytest.raises(TimeoutError):
                await anext(watch)

    asyncio.run(asyncio.wait_for(main(), 60))
