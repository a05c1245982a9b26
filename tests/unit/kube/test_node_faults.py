"""Tests of the stored record of node faults: restarts, two writers, an administrator's changes, and failures."""

import asyncio
import copy
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dljob.faults import Fault, FaultKind, FaultPolicy, Ledger, recorded
from dljob.faults.stored import data, parse
from dljob.kube import Api, ApiError, Cache, NodeFaults
from dljob.kube.kinds import NODE, Kind
from dljob.kube.node_faults import REREAD_S
from support.virtual_time import now_s, run

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
NAME = "dljob-node-faults"
POLICY = FaultPolicy()
Json = dict[str, Any]


class Server(Api):
    """One ConfigMap with the API server's rules: no write over an unseen version."""

    def __init__(self) -> None:
        self.body: Json | None = None
        self.version = self.reads = self.writes = 0
        self.refuses: int | None = None
        self.meddle: list[Any] = []
        """Functions that run between a read and the write after it, as if another operator did them."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        assert (kind.kind, namespace, name) == ("ConfigMap", "dljob-system", NAME)
        self.reads += 1
        self._refuse()
        if self.body is None:
            raise ApiError(404, "NotFound", name)
        found = copy.deepcopy(self.body)
        if self.meddle:
            self.meddle.pop()()
        return found

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Json:
        if self.body is not None:
            raise ApiError(409, "AlreadyExists", NAME)
        return self.put(body)

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Json:
        self._refuse()
        if self.body is None or body["metadata"]["resourceVersion"] != self.body["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", NAME)
        return self.put(body)

    def put(self, body: Mapping[str, Any]) -> Json:
        self.version, self.writes = self.version + 1, self.writes + 1
        self.body = copy.deepcopy(dict(body))
        self.body["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.body)

    def edit(self, **entries: str | None) -> None:
        """Change entries as an administrator does; None deletes one."""
        assert self.body is not None
        changed = {**self.body["data"], **entries}
        self.put({**self.body, "data": {key: value for key, value in changed.items() if value is not None}})

    def _refuse(self) -> None:
        if self.refuses is not None:
            raise ApiError(self.refuses, "Forbidden", NAME)


def fault(n: int, node: str = "n1", namespace: str = "a") -> Fault:
    return Fault(node=node, kind=FaultKind.DEVICE, key=f"uid/{n}", at=at(), namespace=namespace)


def at(more_s: float = 0.0) -> datetime:
    return START + timedelta(seconds=now_s() + more_s)


def made(server: Server, cache: Cache | None = None, policy: FaultPolicy | None = POLICY) -> NodeFaults:
    return NodeFaults(server, cache or Cache(), "dljob-system", NAME, policy, now_s)


def test_record_outlives_the_operator() -> None:
    async def story() -> None:
        server = Server()
        first = made(server)
        assert (await first.note([fault(1)], at())).left_out == ()
        second = made(server)
        noted = await second.note([fault(2)], at())
        [entry] = noted.left_out
        assert (entry.node, entry.namespace, noted.faults) == ("n1", "a", (fault(2),))
        assert set(await made(server).left_out("a", at())) == {"n1"}
        assert await made(server).left_out("b", at()) == {}

    run(story())


def test_known_faults_cost_no_request() -> None:
    async def story() -> None:
        server = Server()
        faults = made(server)
        await faults.note([fault(1)], at())
        before = server.reads, server.writes
        assert await faults.note([fault(1)], at()) == await faults.note([], at())
        assert (server.reads, server.writes) == before

    run(story())


def test_concurrent_writes_are_merged() -> None:
    async def story() -> None:
        server = Server()
        one, other = made(server), made(server)
        await one.note([fault(1, namespace="a")], at())
        server.meddle.append(lambda: server.put({**(server.body or {}), "data": data(ledger_of(fault(2, "n2")))}))
        await other.note([fault(3, namespace="b")], at())
        assert server.body is not None
        # The other writer has replaced everything, and this operator adds its fault to that.
        found = parse(server.body["data"])
        assert {(node, item.key) for node, record in found.items() for item in record.faults} == {
            ("n1", "uid/3"), ("n2", "uid/2"),
        }  # fmt: skip

    run(story())


def ledger_of(item: Fault) -> Ledger:
    return recorded({}, item, POLICY, item.at)


def test_deleted_entry_lets_the_node_return() -> None:
    async def story() -> None:
        server = Server()
        faults = made(server)
        await faults.note([fault(1), fault(2), fault(3, "n2"), fault(4, "n2")], at())
        assert set(await faults.left_out("a", at())) == {"n1", "n2"}
        server.edit(n1=None)
        await asyncio.sleep(REREAD_S + 1)
        assert set(await faults.left_out("a", at())) == {"n2"}

    run(story())


def test_edited_entry_is_replaced() -> None:
    async def story() -> None:
        server = Server()
        faults = made(server)
        await faults.note([fault(1)], at())
        server.edit(n1="nonsense", n2="{}")
        await faults.tidy(at())
        assert server.body is not None and server.body["data"] == {}

    run(story())


def test_annotated_node_is_never_left_out_and_starts_anew() -> None:
    async def story() -> None:
        server, cache = Server(), Cache()
        faults = made(server, cache)
        await faults.note([fault(1), fault(2)], at())
        meta = {"name": "n1", "uid": "u1", "annotations": {"dljob.dev/ignore-faults": "true"}}
        cache.put(NODE, {"metadata": {**meta, "resourceVersion": "1"}})
        assert await faults.left_out("a", at()) == {} and faults.active(at()) == ()
        assert (await faults.note([fault(3), fault(4)], at())).faults == ()
        await faults.tidy(at())
        assert server.body is not None and server.body["data"] == {}
        cache.put(NODE, {"metadata": {**meta, "annotations": {}, "resourceVersion": "2"}})
        assert (await faults.note([fault(5)], at())).left_out == ()

    run(story())


def test_expired_parts_are_removed_from_the_store() -> None:
    async def story() -> None:
        server = Server()
        faults = made(server)
        await faults.note([fault(1)], at())
        await faults.tidy(at(3601))
        assert server.body is not None and server.body["data"] == {}
        writes = server.writes
        await faults.tidy(at(3700))
        assert server.writes == writes, "nothing changes, nothing is written"

    run(story())


def test_empty_record_is_not_stored() -> None:
    async def story() -> None:
        server = Server()
        await made(server).tidy(at())
        assert server.body is None

    run(story())


@pytest.mark.parametrize("code", [403, 500, 0])
def test_planning_goes_on_without_the_record(code: int, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        server = Server()
        faults = made(server)
        server.refuses = code
        assert await faults.left_out("a", at()) == {}
        assert len((await faults.note([fault(1), fault(2)], at())).left_out) == 1
        assert set(await faults.left_out("a", at())) == {"n1"}, "they count in memory"
        await asyncio.sleep(5 * REREAD_S)
        assert set(await faults.left_out("a", at())) == {"n1"}
        assert len(caplog.records) == 1, "one line for failures of one kind"
        server.refuses = None
        await faults.note([fault(3, "n2")], at())
        assert server.body is not None and "n2" in server.body["data"]

    run(story())


def test_switched_off_does_nothing() -> None:
    async def story() -> None:
        server = Server()
        faults = made(server, policy=None)
        assert not faults.on
        await faults.note([fault(1), fault(2)], at())
        await faults.tidy(at())
        assert await faults.left_out("a", at()) == {}
        assert (server.reads, server.writes) == (0, 0)

    run(story())
