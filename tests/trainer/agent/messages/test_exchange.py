"""Tests of the last output of ranks, stored in the ConfigMap JOB-logs of a simulated API server, or in a folder."""

import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dltrain.agent.job.exchange import ConfigMaps, Exchange, Files
from dltrain.agent.job.kube_api import ApiError
from dltrain.record.job_logs import ATTEMPT_FILE, EARLIER_FILE


class Api:
    """The API server's ConfigMap JOB-logs. Before the next write of an agent, the coordinator writes ``first``."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.version = 1
        self.first: dict[str, bytes] | None = None

    async def get(self, name: str) -> dict[str, Any]:
        assert name == "mine-logs"
        binary = {key: base64.b64encode(data).decode() for key, data in self.files.items()}
        return {"metadata": {"resourceVersion": str(self.version)}} | ({"binaryData": binary} if binary else {})

    async def patch_files(self, name: str, files: Mapping[str, bytes | None], version: str) -> None:
        assert name == "mine-logs"
        if self.first is not None:
            self.files, self.version, self.first = self.first, self.version + 1, None
        if version != str(self.version):
            raise ApiError(409, "the object has been modified")
        merged = {**self.files, **files}
        self.files, self.version = {key: data for key, data in merged.items() if data is not None}, self.version + 1


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture(params=["ConfigMap", "folder"])
def exchange(request: pytest.FixtureRequest, api: Any, tmp_path: Path) -> Exchange:
    return ConfigMaps(api, "mine") if request.param == "ConfigMap" else Files(tmp_path / "plan", tmp_path / "report")


def stored(exchange: Exchange, api: Api, tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "report.logs"
    files = (
        api.files if isinstance(exchange, ConfigMaps) else {path.name: path.read_bytes() for path in folder.iterdir()}
    )
    return {name: data for name, data in files.items() if name not in (ATTEMPT_FILE, EARLIER_FILE)}


def attempts(exchange: Exchange, api: Api, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """Return (newest attempt, {file: its attempt} of files from earlier attempts)."""
    folder = tmp_path / "report.logs"
    files = (
        api.files if isinstance(exchange, ConfigMaps) else {path.name: path.read_bytes() for path in folder.iterdir()}
    )
    return files[ATTEMPT_FILE].decode(), json.loads(files.get(EARLIER_FILE, "{}"))


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [("9.9", b"final"), ("10.1", b"final"), ("10.2", b"added"), ("10.10", b"added"), ("11.1", b"added")],
)
def test_output_of_an_older_attempt_does_not_replace_a_newer_one(
    exchange: Exchange, api: Api, tmp_path: Path, attempt: str, expected: bytes
) -> None:
    """A pod that was cut off from the coordinator still has its rank number of an earlier attempt."""

    async def body() -> None:
        await exchange.write_outputs({"rank-0": b"zero", "rank-1": b"final"}, "10.2")
        await exchange.add_outputs({"rank-1": b"added"}, attempt)

    asyncio.run(body())
    assert stored(exchange, api, tmp_path) == {"rank-0": b"zero", "rank-1": expected}


def test_older_attempt_is_not_added_after_a_newer_one(exchange: Exchange, api: Api, tmp_path: Path) -> None:
    async def body() -> None:
        await exchange.add_outputs({"rank-0": b"old"}, "1.1")
        await exchange.add_outputs({"rank-1": b"new"}, "1.3")
        await exchange.add_outputs({"rank-1": b"old", "rank-2": b"old"}, "1.2")

    asyncio.run(body())
    assert stored(exchange, api, tmp_path) == {"rank-0": b"old", "rank-1": b"new"}


@pytest.mark.parametrize(
    ("attempt", "expected"), [("9.9", b"final"), ("10.1", b"final"), ("10.2", b"all"), ("11.1", b"all")]
)
def test_output_of_an_older_coordinator_does_not_replace_a_newer_one(
    exchange: Exchange, api: Api, tmp_path: Path, attempt: str, expected: bytes
) -> None:
    """A coordinator that was cut off from the other pods stops later than the one that has taken over."""

    async def body() -> None:
        await exchange.write_outputs({"rank-0": b"final", "rank-1": b"final"}, "10.2")
        await exchange.write_outputs({"rank-0": b"all"}, attempt)

    asyncio.run(body())
    files = stored(exchange, api, tmp_path)
    assert files["rank-0"] == expected
    assert files.keys() == ({"rank-0"} if expected == b"all" else {"rank-0", "rank-1"}), "nothing of both is mixed"


def test_attempt_of_each_file_is_stored(exchange: Exchange, api: Api, tmp_path: Path) -> None:
    """Pods that no coordinator reaches store only the output of their own ranks."""
    seen = []

    async def body() -> None:
        await exchange.write_outputs({"rank-0": b"a", "rank-1": b"a", "rank-2": b"a"}, "1.1")
        seen.append(attempts(exchange, api, tmp_path))
        await exchange.add_outputs({"rank-1": b"b"}, "1.2")
        seen.append(attempts(exchange, api, tmp_path))
        await exchange.add_outputs({"rank-0": b"c"}, "2.1")
        seen.append(attempts(exchange, api, tmp_path))
        await exchange.add_outputs({"rank-1": b"c", "rank-2": b"c"}, "2.1")
        seen.append(attempts(exchange, api, tmp_path))
        await exchange.add_outputs({"rank-1": b"d"}, "2.2")
        await exchange.write_outputs({"rank-0": b"e"}, "2.2")
        seen.append(attempts(exchange, api, tmp_path))

    asyncio.run(body())
    assert seen == [
        ("1.1", {}),
        ("1.2", {"rank-0": "1.1", "rank-2": "1.1"}),
        ("2.1", {"rank-1": "1.2", "rank-2": "1.1"}),
        ("2.1", {}),
        ("2.2", {}),
    ]


def test_coordinator_does_not_overwrite_what_a_newer_one_stores_meanwhile(api: Any) -> None:
    async def body() -> None:
        exchange = ConfigMaps(api, "mine")
        api.first = {"rank-0": b"newer", ATTEMPT_FILE: b"2.1"}
        await exchange.write_outputs({"rank-0": b"older", "rank-1": b"older"}, "1.4")
        assert api.files == {"rank-0": b"newer", ATTEMPT_FILE: b"2.1"}

    asyncio.run(body())


def test_pod_does_not_overwrite_what_the_coordinator_stores_meanwhile(api: Any) -> None:
    async def body() -> None:
        exchange = ConfigMaps(api, "mine")
        await exchange.write_outputs({"rank-1": b"first"}, "1.1")
        api.first = {"rank-1": b"final", ATTEMPT_FILE: b"1.2"}
        await exchange.add_outputs({"rank-1": b"added"}, "1.1")
        assert api.files["rank-1"] == b"final"
        api.first = {"rank-0": b"zero", ATTEMPT_FILE: b"1.2"}
        await exchange.add_outputs({"rank-1": b"added"}, "1.3")
        assert {name: data for name, data in api.files.items() if name != EARLIER_FILE} == {
            "rank-0": b"zero",
            "rank-1": b"added",
            ATTEMPT_FILE: b"1.3",
        }

    asyncio.run(body())
