"""Tests of jobs that cannot carry out the order to stop: others stop for the job that waits."""

from typing import Any

import pytest

from dljob.kube.answers import ApiError
from dljob.kube.kinds import DLJOB
from support.builders import T4
from support.controller.fake_operator import SPEC, Json, Operator
from support.controller.shared_devices import replicas
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

ONE: Json = {
    **SPEC, "epochs": 1_000_000, "nodes": {"min": 1, "max": 1}, "checkpoint": {"volume": {"claimName": "data"}},
}  # fmt: skip


def test_job_that_cannot_stop_keeps_no_other_from_making_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the job that loses least was ordered to stop again and again, although a webhook rejected that."""

    async def main() -> None:
        cluster = FakeCluster()
        for name in ("n1", "n2"):
            cluster.node(name, T4, 1)
        for namespace in ("team-a", "team-b"):
            cluster.claim("data", "ReadWriteMany", namespace)
        cluster.priority_class("urgent", 1000)
        async with Operator(cluster, preempts=True) as operator:
            fixed, other = cluster.submit("fixed", "team-b", **ONE), cluster.submit("other", second=1, **ONE)
            await operator.watch(1.0)
            for key, node in ((fixed, "n1"), (other, "n2")):
                await cluster.bind(await cluster.create_pods(key), node)
            await operator.watch(1.0)
            progress = {"step": 5000, "steps": 10**9, "percent": 0}
            await cluster.api.merge(DLJOB, *other, {"status": {"progress": progress}})
            scale = operator.kube.scale

            async def rejected(job: Any, item: Any) -> Any:
                if job.key == fixed:
                    raise ApiError(403, "Forbidden", "a webhook rejects the change")
                return await scale(job, item)

            monkeypatch.setattr(operator.kube, "scale", rejected)
            high = cluster.submit("high", second=2, **ONE, scheduling={"priorityClassName": "urgent"})
            await operator.watch(30.0)
            assert [await replicas(cluster, key) for key in (fixed, other)] == [1, 1]
            assert operator.planned(high) == "MakingRoom"
            await operator.watch(90.0)
            assert [await replicas(cluster, key) for key in (fixed, other)] == [1, 0]

    run(main())
