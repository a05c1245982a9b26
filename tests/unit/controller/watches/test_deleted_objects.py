"""Objects that the operator does not watch are applied again, in case somebody has deleted them."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

import dlcontract
from dljob.kube import ApiError, JobKey
from dljob.kube.applying import applier, looks
from dljob.kube.kinds import CONFIG_MAP, DLJOB, SERVICE
from support.builders import T4
from support.controller.fake_operator import Operator
from support.controller.shared_devices import LONG, together, train
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s

FAILURE = dlcontract.Failure(reason="PodLost", message="lost contact with the agent of pod first-gpu-0")


async def has_service(cluster: FakeCluster, key: JobKey) -> bool:
    try:
        return bool(await cluster.api.get(SERVICE, *key))
    except ApiError as error:
        assert error.not_found
        return False


async def report(cluster: FakeCluster, key: JobKey, **changes: Any) -> None:
    """Change the job's report, as its coordinator does."""
    name = f"{key[1]}-report"
    text = (await cluster.api.get(CONFIG_MAP, key[0], name))["data"][dlcontract.REPORT_KEY]
    changed = dlcontract.Report.parse(text).model_copy(update=changes)
    await cluster.api.merge(CONFIG_MAP, key[0], name, {"data": {dlcontract.REPORT_KEY: changed.to_json()}})


@pytest.mark.parametrize(("recovers", "stepped_s"), [(True, 0.0), (True, -3600.0), (False, 0.0)])
def test_deleted_service_of_a_job_that_recovers_is_created_within_a_minute(
    recovers: bool, stepped_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: it was created with the next resync, within ten minutes, and the pods could not find each other.

    A clock that was set back delayed that further.
    """
    offset_s = [0.0]
    for module in (applier, looks):
        monkeypatch.setattr(module, "monotonic", lambda: now_s() + offset_s[0])

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, key, "n1")
        await cluster.api.delete(SERVICE, *key)
        offset_s[0] = stepped_s
        if recovers:
            await report(cluster, key, phase=dlcontract.RunPhase.RESTARTING, failure=FAILURE)
        await operator.watch(60.0)
        assert await has_service(cluster, key) is recovers

    together({"n1": T4}, body)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("change", ["none", "changed", "removed", "deleted"])
def test_resync_applies_only_what_somebody_has_changed_or_deleted(
    change: str, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: with thousands of jobs, applying all their objects again kept the API server busy.

    After a restart of the operator, it did so once more.
    """
    offset_s = [0.0]
    for module in (applier, looks):
        monkeypatch.setattr(module, "monotonic", lambda: now_s() + offset_s[0])

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, key, "n1")
        before = await cluster.api.get(SERVICE, *key)
        if change == "changed":
            await cluster.api.merge(
                SERVICE, *key, {"spec": {"clusterIP": "10.0.0.1", "selector": {"dljob.dev/job": "other"}}}
            )
        elif change == "removed":  # As by ``kubectl edit``: a client that only removes fields owns none.
            await cluster.api.merge(SERVICE, *key, {"spec": {"publishNotReadyAddresses": None}})
        elif change == "deleted":
            await cluster.api.delete(SERVICE, *key)
        applied = list[str]()
        apply = cluster.api.apply

        async def recorded(kind: Any, body: Any, *rest: Any, **options: Any) -> Any:
            applied.append(kind.kind)
            return await apply(kind, body, *rest, **options)

        monkeypatch.setattr(cluster.api, "apply", recorded)
        async with AsyncExitStack() as others:
            if restarts:
                operator = await others.enter_async_context(Operator(cluster))
            for _ in range(2):
                operator.queue.add(key)  # A new operator looks after a part of the interval.
                await operator.watch(3.0)
                offset_s[0] += 601.0
                operator.queue.add(key)
                await operator.watch(3.0)
        assert applied == ([] if change == "none" else ["Service"])
        after = await cluster.api.get(SERVICE, *key)
        for name in ("selector", "publishNotReadyAddresses"):
            assert after["spec"][name] == before["spec"][name]

    together({"n1": T4}, body)


def test_status_does_not_wait_for_the_looks_at_other_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the status of a job whose objects were due to be looked at waited for an API server that was busy."""
    offset_s = [0.0]
    for module in (applier, looks):
        monkeypatch.setattr(module, "monotonic", lambda: now_s() + offset_s[0])

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, key, "n1")
        answered = asyncio.Event()
        metadata_of = cluster.api.metadata_of

        async def slow(*args: Any) -> Any:
            await answered.wait()
            return await metadata_of(*args)

        monkeypatch.setattr(cluster.api, "metadata_of", slow)
        offset_s[0] += 601.0
        await report(cluster, key, step=777)
        await operator.watch(15.0)
        assert (await cluster.api.get(DLJOB, *key))["status"]["progress"]["step"] == 777
        answered.set()

    together({"n1": T4}, body)


@pytest.mark.parametrize(
    "error", [ApiError(500, "InternalError", "no etcd"), ApiError(403, "Forbidden", "no")], ids=str
)
def test_deleted_object_is_applied_again_as_soon_as_the_api_server_accepts_it(
    error: ApiError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: if that failed once, the operator took the object for applied, and looked again minutes later.

    Until then, the job's status is written, once in each reconcile.
    """
    offset_s = [0.0]
    for module in (applier, looks):
        monkeypatch.setattr(module, "monotonic", lambda: now_s() + offset_s[0])
    monkeypatch.setattr(applier.random, "uniform", lambda low, high: low)

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, key, "n1")
        await cluster.api.delete(SERVICE, *key)
        apply, fails = cluster.api.apply, [True]

        async def failing(kind: Any, body: Any, *rest: Any, **options: Any) -> Any:
            if kind is SERVICE and fails:
                raise error
            return await apply(kind, body, *rest, **options)

        monkeypatch.setattr(cluster.api, "apply", failing)
        offset_s[0] += 601.0
        await report(cluster, key, step=777)
        await operator.watch(5.0)
        assert not await has_service(cluster, key)
        assert (await cluster.api.get(DLJOB, *key))["status"]["progress"]["step"] == 777
        rejected = ("False", "ObjectRejected") if error.forbidden else ("True", "AllReady")
        assert operator.condition(key, "PodsReady") == rejected and operator.planned(key) == "Planned"
        assert all(body["count"] == 1 for (kind, _, _), body in cluster.api.objects.items() if kind == "events")
        fails.clear()
        await operator.watch(20.0)
        assert await has_service(cluster, key)

    together({"n1": T4}, body)
