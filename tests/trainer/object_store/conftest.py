"""Fixtures of the tests of object stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dltrain.object_store import watching
from support.trainer.object_store import Server, server
from support.trainer.uploading_pods import Clock, Pods


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


@pytest.fixture
def pods(tmp_path: Path, store: Server, monkeypatch: pytest.MonkeyPatch) -> Pods:
    made = Pods(tmp_path)
    monkeypatch.setattr(watching, "time", Clock(made))
    return made
