"""Fixtures of the tests of object stores."""

from collections.abc import Iterator

import pytest

from support.trainer.object_store import Server, server


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Run an S3 server with the bucket ``models``, and let this process use it."""
    with server() as running:
        for name, value in running.environ().items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between repetitions and do not wait."""
    waited: list[float] = []
    monkeypatch.setattr("dltrain.host.volume_access.time.sleep", waited.append)
    return waited
