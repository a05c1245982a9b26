"""Tests of a PriorityClass that somebody deletes while jobs use it: each job says so, and no job is lost."""

from datetime import timedelta

import pytest

from dljob.kube.kinds import POD, PRIORITY_CLASS, STATEFUL_SET
from dljob.reconcile.gang import FIRST_BACK_OFF_S, START_TIMEOUT_S
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s

NAMED = {**SPEC, "scheduling": {"priorityClassName": "batch"}}


def test_running_job_runs_on_waits_after_a_loss_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dljob.kube.events.warning_events.monotonic", now_s)

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("batch", 10)
        cluster.priority_class("system-node-critical", 2_000_001_000)
        await operator.watch(1.0)
        key = cluster.submit("first", **NAMED)
        await operator.watch()
        pods = await cluster.create_pods(key)
        await cluster.bind(pods, "n1", "n2")

        async def reconciled(seconds: float = 3.0) -> None:
            await operator.watch(1.0)
            operator.queue.add(key)
            await operator.watch(seconds)

        async def replicas() -> int:
            [created] = await cluster.api.find(STATEFUL_SET, "team-a")
            return int(created["spec"]["replicas"])

        await cluster.api.delete(PRIORITY_CLASS, None, "batch")
        await reconciled()
        assert operator.condition(key, "PriorityClassFound") == ("False", "PriorityClassNotFound")
        assert "pods run on" in operator.message(key, "PriorityClassFound") and await replicas() == 2

        # A pod is lost, and the API server rejects its replacement.
        await cluster.api.delete(POD, "team-a", pods[0]["metadata"]["name"])
        [created] = await cluster.api.find(STATEFUL_SET, "team-a")
        cluster.warn(created, "FailedCreate", "no PriorityClass with name batch was found")
        await reconciled(30)
        assert operator.condition(key, "PodsReady") == ("False", "PodsRejected")
        operator.now += timedelta(seconds=START_TIMEOUT_S)
        await reconciled()
        assert operator.condition(key, "Admitted") == ("False", "StartTimedOut") and await replicas() == 0
        await cluster.api.delete(POD, "team-a", pods[1]["metadata"]["name"])
        operator.now += timedelta(seconds=2 * FIRST_BACK_OFF_S)
        await reconciled()
        assert operator.condition(key, "Admitted") == ("False", "NoPlan") and operator.condition(key, "Failed") is None
        assert "The job waits until then" in operator.message(key, "PriorityClassFound")

        # Another job does not wait for its devices meanwhile.
        other = cluster.submit("other", "team-b", second=1, **SPEC)
        await operator.watch()
        assert operator.planned(other) == "Planned"
        await cluster.edit(other, suspend=True)
        await operator.watch()

        cluster.priority_class("batch", 10)
        await reconciled(30)
        assert operator.condition(key, "PriorityClassFound") == ("True", "PriorityClassFound")
        assert operator.condition(key, "Admitted") == ("True", "Starting") and await replicas() == 2

    on_two_nodes(body)
