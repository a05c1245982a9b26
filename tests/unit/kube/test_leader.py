"""Tests of leader election: never two leaders, and a new one soon after a loss, with a Lease in memory and virtual time."""

import asyncio
import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.kube import Api, ApiError
from dljob.kube.kinds import Kind
from dljob.kube.leader import (
    DURATION_S,
    GIVE_UP_S,
    LEASE_NAME,
    RENEW_S,
    RETRY_S,
    Leader,
    LeaseLostError,
)
from support.virtual_time import now_s, run, within

HOUR_S = 3600.0
Faults = Callable[[float], str]


def no_faults(_: float) -> str:
    return "no_faults"


class Server:
    """One Lease with the API server's rules: unique names, and no write over an unseen version."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0

    def write(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(dict(body))
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


class Connection(Api):
    """The connection of one operator to the server, on which calls can fail or never be answered."""

    def __init__(self, server: Server, faults: Faults = no_faults) -> None:
        self.far, self.faults = server, faults

    async def _maybe_fail(self) -> None:
        await asyncio.sleep(0.01)
        match self.faults(now_s()):
            case "refusing":
                raise ApiError(503, "ServiceUnavailable", "apiserver is shutting down")
            case "silent":
                await asyncio.Event().wait()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> dict[str, Any]:
        await self._maybe_fail()
        assert (kind.kind, namespace, name) == ("Lease", "dljob", LEASE_NAME)
        if self.far.lease is None:
            raise ApiError(404, "NotFound", "no such Lease")
        return copy.deepcopy(self.far.lease)

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._maybe_fail()
        if self.far.lease is not None:
            raise ApiError(409, "AlreadyExists", "there is such a Lease")
        return self.far.write(body)

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._maybe_fail()
        if self.far.lease is None or body["metadata"]["resourceVersion"] != str(self.far.version):
            raise ApiError(409, "Conflict", "the Lease has changed")
        return self.far.write(body)

    async def find(self, kind: Kind, namespace: str | None, **params: str) -> list[dict[str, Any]]:
        await self._maybe_fail()
        assert kind.kind == "Lease" and namespace is None
        return [copy.deepcopy(self.far.lease)] if self.far.lease is not None else []


class Disturbed(Connection):
    """A connection on which one renewal, after ten seconds, is disturbed, or all are slow."""

    def __init__(self, server: Server, how: str) -> None:
        super().__init__(server)
        self.how = how

    def _is_due(self, how: str) -> bool:
        if self.how != how or now_s() < 10.0:
            return False
        self.how = "no more"
        return True

    async def get(self, kind: Kind, namespace: str | None, name: str) -> dict[str, Any]:
        if self._is_due("the connection is dead"):
            await asyncio.Event().wait()
        if self.how == "every request takes a second":
            await asyncio.sleep(1.0)
        found = await super().get(kind, namespace, name)
        if self._is_due("somebody edits the Lease"):
            self.far.write(found)
        return found

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.how == "every request takes a second":
            await asyncio.sleep(1.0)
        if self._is_due("the answer is lost, and the request is sent again"):
            await super().replace(kind, body)
        return await super().replace(kind, body)


@pytest.mark.parametrize(
    "how",
    [
        "somebody edits the Lease",
        "the answer is lost, and the request is sent again",
        "the connection is dead",
        "every request takes a second",
    ],
)
def test_leader_keeps_the_lease_that_it_holds(how: str) -> None:
    """Fixed bug: it gave up the Lease, and all jobs were planned and reconciled anew."""

    async def scenario() -> None:
        server = Server()
        connection = Disturbed(server, how)
        one = Leader(connection, "dljob", "a", clock=now_s)
        await one.acquire()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.hold(), 60.0)
        assert connection.how in ("no more", "every request takes a second") and server.holder == "a"
        assert server.lease is not None and server.lease["spec"]["leaseTransitions"] == 0

    run(scenario())


def leader(server: Server, identity: str, faults: Faults = no_faults) -> Leader:
    return Leader(Connection(server, faults), "dljob", identity, clock=now_s)


def test_first_operator_leads_at_once() -> None:
    async def scenario() -> None:
        server = Server()
        await leader(server, "a").acquire()
        assert now_s() < 1
        assert server.lease is not None
        spec = server.lease["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", DURATION_S, 0)
        assert spec["acquireTime"] == spec["renewTime"]

    run(scenario())


def test_one_of_two_operators_becomes_the_leader() -> None:
    async def scenario() -> None:
        server = Server()
        two = [asyncio.create_task(within(HOUR_S / 100, leader(server, name).acquire())) for name in "ab"]
        await asyncio.sleep(RETRY_S)
        assert [task.done() for task in two].count(True) == 1
        for task in two:
            task.cancel()

    run(scenario())


def test_renewed_lease_is_not_acquired_by_another() -> None:
    async def scenario() -> None:
        server = Server()
        first = leader(server, "a")
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        assert not await within(HOUR_S, leader(server, "b").acquire())
        assert server.holder == "a"
        holding.cancel()

    run(scenario())


def test_lease_of_a_dead_leader_is_acquired_after_it_expires() -> None:
    async def scenario() -> None:
        server = Server()
        await leader(server, "a").acquire()
        died_s = now_s()
        await leader(server, "b").acquire()
        assert DURATION_S <= now_s() - died_s <= DURATION_S + 2 * RETRY_S
        assert server.lease is not None
        assert (server.holder, server.lease["spec"]["leaseTransitions"]) == ("b", 1)

    run(scenario())


def test_lease_expiry_uses_the_operators_own_clock() -> None:
    async def scenario() -> None:
        server = Server()
        await leader(server, "a").acquire()
        assert server.lease is not None
        server.lease["spec"]["renewTime"] = "1970-01-01T00:00:00.000000Z"  # the clock of the other node is wrong
        assert not await within(DURATION_S - 1, leader(server, "b").acquire())

    run(scenario())


def test_leader_that_shuts_down_is_replaced_at_once() -> None:
    async def scenario() -> None:
        server = Server()
        first = leader(server, "a")
        await first.acquire()
        follower = asyncio.create_task(leader(server, "b").acquire())
        await asyncio.sleep(RETRY_S)
        await first.release()
        assert await within(RETRY_S + 1, follower)
        assert server.holder == "b"

    run(scenario())


def test_lease_of_another_operator_is_not_released() -> None:
    async def scenario() -> None:
        server = Server()
        first = leader(server, "a")
        await first.acquire()
        await leader(server, "b").acquire()
        await first.release()
        assert server.holder == "b"

    run(scenario())


def test_restarted_operator_of_the_same_name_continues() -> None:
    async def scenario() -> None:
        server = Server()
        await leader(server, "a").acquire()
        began_s = now_s()
        await leader(server, "a").acquire()
        assert now_s() - began_s < 1
        assert server.lease is not None
        assert server.lease["spec"]["leaseTransitions"] == 0

    run(scenario())


def test_leader_stops_if_another_acquired_its_lease() -> None:
    async def scenario() -> None:
        server = Server()
        first = leader(server, "a")
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        await asyncio.sleep(RENEW_S / 2)
        assert server.lease is not None
        server.lease["spec"]["holderIdentity"] = "b"
        server.write(server.lease)
        with pytest.raises(LeaseLostError, match="another"):
            await holding
        assert now_s() < 2 * RENEW_S

    run(scenario())


@pytest.mark.parametrize("faults", ["refusing", "silent"])
def test_leader_that_cannot_renew_stops_before_another_may_start(faults: str) -> None:
    async def scenario() -> None:
        server = Server()
        first = leader(server, "a", lambda at_s: "no_faults" if at_s < 1 else faults)
        await first.acquire()
        with pytest.raises(LeaseLostError):
            await first.hold()
        assert GIVE_UP_S - RENEW_S <= now_s() < DURATION_S

    run(scenario())


def test_late_response_does_not_extend_the_lease() -> None:
    class Late(Connection):
        """The server writes the first renewal at once and responds ten seconds later."""

        async def replace(self, kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
            written = await super().replace(kind, body)
            if self.far.version == 2:
                await asyncio.sleep(10)
            return written

    async def scenario() -> None:
        server = Server()
        first = Leader(
            Late(server, lambda at_s: "no_faults" if at_s < RENEW_S + 1 else "refusing"), "dljob", "a", clock=now_s
        )
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        await leader(server, "b").acquire()
        assert holding.done(), "there are two leaders"
        assert isinstance(holding.exception(), LeaseLostError)

    run(scenario())


def test_leader_survives_a_short_outage() -> None:
    async def scenario() -> None:
        server = Server()
        first = leader(
            server, "a", lambda at_s: "refusing" if 10 < at_s < 10 + GIVE_UP_S - 2 * RENEW_S else "no_faults"
        )
        await first.acquire()
        assert not await within(10 * DURATION_S, first.hold())
        assert now_s() >= 10 * DURATION_S

    run(scenario())


def test_waiting_operator_survives_an_outage() -> None:
    async def scenario() -> None:
        server = Server()
        await leader(server, "a", lambda at_s: "refusing" if at_s < 100 else "no_faults").acquire()
        assert 100 <= now_s() <= 100 + 2 * RETRY_S

    run(scenario())


OUTAGES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 60), st.sampled_from(["refusing", "silent"])), max_size=6
)


def _faults(outages: list[tuple[int, int, str]]) -> Faults:
    return lambda at_s: next((kind for start, long, kind in outages if start <= at_s < start + long), "no_faults")


@settings(max_examples=60, deadline=None)
@given(OUTAGES, OUTAGES)
def test_there_are_never_two_leaders(first: list[tuple[int, int, str]], second: list[tuple[int, int, str]]) -> None:
    leading: set[str] = set()

    async def operate(server: Server, name: str, faults: Faults) -> None:
        while True:
            one = leader(server, name, faults)
            if not await within(2 * DURATION_S, one.acquire()):
                continue  # a process that hangs is started again
            leading.add(name)
            assert leading == {name}
            try:
                await one.hold()
            except LeaseLostError:
                leading.discard(name)

    async def scenario() -> None:
        server = Server()
        both = [
            asyncio.create_task(operate(server, name, _faults(outages)))
            for name, outages in (("a", first), ("b", second))
        ]
        done, _ = await asyncio.wait(both, timeout=400)
        for task in both:
            task.cancel()
        for task in done:
            task.result()
        assert len(leading) == 1, "one leads after the faults have ended"

    run(scenario())


def test_paused_leader_does_not_lead() -> None:
    async def scenario() -> None:
        server = Server()
        first = leader(server, "a")
        await first.acquire()
        assert first.leads()
        await asyncio.sleep(GIVE_UP_S)  # The process was stopped: nothing renewed the Lease.
        assert not first.leads()

    run(scenario())
