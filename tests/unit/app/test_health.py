"""Tests of the probes: the log says why the liveness probe fails, because the kubelet shows only the code."""

import asyncio
import logging

import aiohttp
import pytest

from dljob.app.health import serve
from dljob.controller.metrics import Metrics


def test_log_says_why_the_liveness_probe_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> list[int]:
        runner = await serve(0, Metrics(), lambda: "the watch of pods is silent", lambda: "first lists", lambda: None)
        # Port 0 is another port for each address, and the order of IPv4 and IPv6 is chance.
        port = next(address[1] for address in runner.addresses if address[0] == "0.0.0.0")
        found = []
        try:
            async with aiohttp.ClientSession() as session:
                for path in ("readyz", "healthz"):
                    async with session.get(f"http://127.0.0.1:{port}/{path}") as answer:
                        found.append(answer.status)
        finally:
            await runner.cleanup()
        return found

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(body()) == [503, 503]
    assert [record.getMessage() for record in caplog.records] == [
        "the liveness probe fails: the watch of pods is silent"
    ]
