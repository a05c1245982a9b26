"""Tests of Leases of several releases and of users: two releases never manage one namespace, and no forged Lease stops one."""

import asyncio
import copy
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from dljob.kube import Api, ApiError
from dljob.kube.kinds import LEASE, Kind
from dljob.kube.leader import DURATION_S, MAX_DURATION_S, RIVALS_S, YIELD_S, Leader, LeaseLostError
from support.builders import NOW
from support.virtual_time import now_s, run, within


class Leases(Api):
    """An API server with the Leases of several releases."""

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.version = 0

    async def get(self, kind: Kind, namespace: str | None, name: str) -> dict[str, Any]:
        if f"{namespace}/{name}" not in self.leases:
            raise ApiError(404, "NotFound", "no such Lease")
        return copy.deepcopy(self.leases[f"{namespace}/{name}"])

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
        self.version += 1
        created = {"creationTimestamp": (NOW + timedelta(seconds=int(now_s()))).isoformat()}
        meta = {**created, **body["metadata"], "resourceVersion": str(self.version)}
        lease = copy.deepcopy({**body, "metadata": meta})
        self.leases[f"{meta['namespace']}/{meta['name']}"] = lease
        return copy.deepcopy(lease)

    create = replace

    async def find(self, kind: Kind, namespace: str | None, **params: str) -> list[dict[str, Any]]:
        return copy.deepcopy(list(self.leases.values()))


def release(server: Leases, namespace: str, *manages: str) -> Leader:
    return Leader(server, namespace, f"pod-of-{namespace}", f"dljob-{namespace}", manages, clock=now_s)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [((), (), False), ((), ("a",), False), (("a", "b"), ("b", "c"), False), (("a",), ("b",), True)],
)
def test_two_releases_for_the_same_namespace_refuse_each_other(
    first: tuple[str, ...], second: tuple[str, ...], both: bool
) -> None:
    """Fixed bug: both acted on the same jobs under the same field owner."""

    async def scenario() -> None:
        server = Leases()
        one, two = release(server, "x", *first), release(server, "y", *second)
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        assert await within(60, two.acquire()) == both
        assert (two.blocked_by is None) == both
        if not both:
            assert "dljob-x in namespace x" in (two.blocked_by or "")
            holding.cancel()
            await one.release()
            assert await within(30, two.acquire()), "the other release is gone"

    run(scenario())


def test_of_two_releases_that_start_together_one_yields() -> None:
    async def scenario() -> None:
        server = Leases()
        leaders = [release(server, name) for name in "xy"]
        await asyncio.gather(*(each._take() for each in leaders))
        tasks = [asyncio.create_task(each.hold()) for each in leaders]
        done, _ = await asyncio.wait(tasks, timeout=60)
        assert len(done) == 1 and isinstance(done.pop().exception(), LeaseLostError)

    run(scenario())


FORGED: dict[str, Any] = {
    "metadata": {"namespace": "team-a", "name": "dljob", "labels": {"app.kubernetes.io/part-of": "dljob"}},
    "spec": {
        "holderIdentity": "me", "acquireTime": "2000-01-01T00:00:00.000000Z", "leaseDurationSeconds": 2**31 - 1,
        "leaseTransitions": 0,
    },
}  # fmt: skip
"""A Lease that any user who may create Leases can write. Kubernetes' own role edit allows that."""


def test_large_leases_of_users_do_not_stop_the_operator() -> None:
    class Flooded(Leases):
        async def find(self, kind: Kind, namespace: str | None, **params: str) -> list[dict[str, Any]]:
            raise ApiError(413, "AnswerTooLarge", "found an answer of more than 10485760 bytes")

    async def scenario() -> None:
        one = release(Flooded(), "x")
        await asyncio.wait_for(one.acquire(), 60)
        assert one.leads()

    run(scenario())


async def renewed(server: Leases) -> None:
    while True:
        await server.replace(LEASE, FORGED)
        await asyncio.sleep(1.0)


@pytest.mark.parametrize("active", [False, True])
def test_lease_of_a_user_does_not_stop_the_operator(active: bool) -> None:
    """Fixed bug: one such object stopped the operator for all namespaces, and kept it from starting again."""

    async def scenario() -> None:
        server = Leases()
        one = release(server, "x")
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        await asyncio.sleep(1.5)
        renewing = asyncio.create_task(renewed(server))
        standby = Leader(server, "x", "other-pod", "dljob-x", clock=now_s)
        waiting = asyncio.create_task(standby.acquire())
        await asyncio.sleep(300)
        assert one.leads() and not waiting.done() and standby.blocked_by is None
        if not active:
            renewing.cancel()
        holding.cancel()
        assert await within(DURATION_S + 1, waiting), "the release was active, so that no other one can be"
        await standby.release()
        restarted = Leader(server, "x", "next-pod", "dljob-x", clock=now_s)
        assert await within(YIELD_S + 2, restarted.acquire())
        renewing.cancel()

    run(scenario())


def test_lease_of_a_user_before_the_installation_counts_only_while_it_is_renewed() -> None:
    async def scenario() -> None:
        server = Leases()
        await server.replace(LEASE, FORGED)
        one = release(server, "x")
        waiting = asyncio.create_task(one.acquire())
        await asyncio.sleep(5)
        assert "team-a" in (one.blocked_by or "")
        assert await within(MAX_DURATION_S + 2 * RIVALS_S, waiting)

    run(scenario())


def test_deleted_leases_of_users_are_forgotten() -> None:
    """Fixed bug: the leader kept the name of each Lease that a user ever wrote."""

    async def scenario() -> None:
        server = Leases()
        one = release(server, "x")
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        await asyncio.sleep(1.5)  # The Lease of the release is the older one.
        for i in range(20):
            meta = {**FORGED["metadata"], "name": f"forged-{i}"}
            await server.replace(LEASE, {**FORGED, "metadata": meta})
            await asyncio.sleep(2 * RIVALS_S)
            del server.leases[f"{meta['namespace']}/{meta['name']}"]
        assert one.leads() and len(one._rivals_seen) <= 1
        holding.cancel()

    run(scenario())


def test_earlier_release_that_returns_waits_until_the_later_one_has_stopped() -> None:
    async def scenario() -> None:
        server = Leases()
        earlier = release(server, "x")
        await earlier.acquire()
        await asyncio.sleep(2)
        await earlier.release()
        later = release(server, "y")
        await later.acquire()
        holding = asyncio.create_task(later.hold())
        await asyncio.sleep(60)
        earlier = release(server, "x")
        again = asyncio.create_task(earlier.acquire())
        while not again.done():
            assert not (earlier.leads() and later.leads())
            await asyncio.sleep(0.1)
        assert earlier.leads() and not later.leads()
        assert isinstance(holding.exception(), LeaseLostError) and "dljob-x" in (later.blocked_by or "")

    run(scenario())
