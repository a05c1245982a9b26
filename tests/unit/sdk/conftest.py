"""Fixtures of the SDK's tests: an API server in a thread, and a client of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dljob.kube.kinds import NODE
from dljob.sdk import Client, requests
from support.servers.threaded_api import ThreadedApiServer, threaded_api


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedApiServer]:
    """An API server with three nodes, and a kubeconfig for it in KUBECONFIG."""
    monkeypatch.setattr(requests, "PAUSE_S", 0.01)
    with threaded_api(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        for number in range(3):
            allocatable = {"cpu": "4", "memory": "8Gi", "pods": "110"}
            ready = {"type": "Ready", "status": "True"}
            body = {
                "metadata": {"name": f"n{number}", "labels": {"kubernetes.io/hostname": f"n{number}"}},
                "spec": {},
                "status": {"allocatable": allocatable, "capacity": allocatable, "conditions": [ready]},
            }
            server.put(NODE, body)
        yield server


@pytest.fixture
def client(api: ThreadedApiServer) -> Iterator[Client]:
    with Client() as found:
        yield found
