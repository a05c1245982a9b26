"""Objects that the operator does not watch are applied again, in case somebody has deleted them."""

from typing import Any

import pytest

import dlcontract
from dljob.kube import ApiError, JobKey, applier
from dljob.kube.kinds import CONFIG_MAP, SERVICE
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


@pytest.mark.parametrize(("recovers", "stepped_s"), [(True, 0.0), (True, -3600.0), (False, 0.0)])
def test_deleted_service_of_a_job_that_recovers_is_created_within_a_minute(
    recovers: bool, stepped_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: it was created with the next resync, within ten minutes, and the pods could not find each other.

    A clock that was set back delayed that further.
    """
    offset_s = [0.0]
    monkeypatch.setattr(applier, "monotonic", lambda: now_s() + offset_s[0])

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, key, "n1")
        await cluster.api.delete(SERVICE, *key)
        offset_s[0] = stepped_s
        if recovers:
            text = (await cluster.api.get(CONFIG_MAP, key[0], f"{key[1]}-report"))["data"][dlcontract.REPORT_KEY]
            report = dlcontract.Report.parse(text)
            lost = report.model_copy(update={"phase": dlcontract.RunPhase.RESTARTING, "failure": FAILURE})
            data = {dlcontract.REPORT_KEY: lost.to_json()}
            await cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-report", {"data": data})
        await operator.watch(60.0)
        assert await has_service(cluster, key) is recovers

    together({"n1": T4}, body)


@pytest.mark.parametrize("change", ["none", "changed", "deleted"])
def test_resync_applies_only_what_somebody_has_changed_or_deleted(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: with thousands of jobs, applying all their objects again kept the API server busy."""
    offset_s = [0.0]
    monkeypatch.setattr(applier, "monotonic", lambda: now_s() + offset_s[0])

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, key, "n1")
        before = await cluster.api.get(SERVICE, *key)
        if change == "changed":
            await cluster.api.merge(
                SERVICE, *key, {"spec": {"clusterIP": "10.0.0.1", "selector": {"dljob.dev/job": "other"}}}
            )
        elif change == "deleted":
            await cluster.api.delete(SERVICE, *key)
        applied = list[str]()
        apply = cluster.api.apply

        async def recorded(kind: Any, body: Any, *rest: Any, **options: Any) -> Any:
            applied.append(kind.kind)
            return await apply(kind, body, *rest, **options)

        monkeypatch.setattr(cluster.api, "apply", recorded)
        for _ in range(2):
            offset_s[0] += 601.0
            operator.queue.add(key)
            await operator.watch(3.0)
        assert applied == ([] if change == "none" else ["Service"])
        after = await cluster.api.get(SERVICE, *key)
        assert after["spec"]["selector"] == before["spec"]["selector"]

    together({"n1": T4}, body)
