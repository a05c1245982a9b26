"""Tests of the Secret with the key that signs plans."""

import asyncio
import base64
import logging
from typing import Any

import pytest

from dljob.kube import PlanKeySecret, plan_key
from dljob.kube.answers import ApiError
from dljob.kube.kinds import SECRET
from dljob.kube.objects.stored_plans import StoredPlans
from support.builders import job
from support.servers.fake_api import FakeApi

WHERE = ("system", "dljob-plan-key")
DATA = {"plan.json": "{}", "operator.json": "{}"}


def key_of(api: FakeApi) -> tuple[PlanKeySecret, StoredPlans]:
    plans = StoredPlans()
    found: Any = api
    return PlanKeySecret(found, *WHERE, plans), plans


def key_id(plans: StoredPlans) -> str:
    """Return the id of the key with which plans are signed."""
    signature = plans.signature(job(), DATA)
    assert signature is not None
    return signature.split(":")[1]


def test_replicas_share_one_key() -> None:
    async def body() -> None:
        api = FakeApi()
        pairs = [key_of(api) for _ in range(3)]
        await asyncio.gather(*(secret.load() for secret, _ in pairs))
        assert len({key_id(plans) for _, plans in pairs}) == 1
        stored = await api.get(SECRET, *WHERE)
        assert len(base64.b64decode(stored["data"]["key"])) == 32

    asyncio.run(body())


def test_replica_that_is_second_to_create_the_key_uses_the_first() -> None:
    class Late(FakeApi):
        async def get(self, *args: Any, **more: Any) -> Any:
            first, self.answered = not getattr(self, "answered", False), True
            if first:
                raise ApiError(404, "NotFound", "dljob-plan-key")
            return await super().get(*args, **more)

    async def body() -> None:
        api, late = FakeApi(), Late()
        first, plans = key_of(api)
        await first.load()
        late.objects = api.objects
        second, others = key_of(late)
        await second.load()
        assert key_id(plans) == key_id(others)

    asyncio.run(body())


def test_deleted_key_is_replaced() -> None:
    async def body() -> None:
        api = FakeApi()
        secret, plans = key_of(api)
        await secret.load()
        before = key_id(plans)
        await api.delete(SECRET, *WHERE)
        await secret.refresh()
        assert key_id(plans) != before

    asyncio.run(body())


def test_operator_works_without_the_permission_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        api = FakeApi()
        api.unreadable.add("Secret")
        secret, plans = key_of(api)
        await secret.load()
        await secret.refresh()
        assert plans.signature(job(), DATA) is None and not plans.signs

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert len(caplog.records) == 1 and "plans are not checked" in caplog.text


def test_load_waits_until_the_api_server_answers_and_names_the_secret(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_key, "RETRY_S", 0.0)

    async def body() -> None:
        api = FakeApi()
        api.unavailable.add("Secret")
        secret, plans = key_of(api)
        assert "Secret system/dljob-plan-key" in secret.description
        loading = asyncio.create_task(secret.load())
        while caplog.text.count("waiting for Secret system/dljob-plan-key") < 3:
            await asyncio.sleep(0)
        api.unavailable.clear()
        await loading
        assert plans.signs

    asyncio.run(body())


def test_invalid_key_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        api = FakeApi()
        data = {"key": base64.b64encode(b"short").decode()}
        await api.create(SECRET, {"metadata": {"name": WHERE[1], "namespace": WHERE[0]}, "data": data})
        secret, plans = key_of(api)
        await secret.load()
        assert not plans.signs

    asyncio.run(body())
    assert "found 5 bytes" in caplog.text and "Delete the Secret" in caplog.text
