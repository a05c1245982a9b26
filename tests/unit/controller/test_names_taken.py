"""Tests of jobs that wait until an object of another owner with one of their names is gone."""

from typing import Any

from dljob.job.observed import JOB_LABEL
from dljob.kube.kinds import CONFIG_MAP
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster


def test_a_job_without_its_names_reserves_no_devices() -> None:
    """Regression: it was planned once a minute, and others waited for the devices of this plan."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        meta: dict[str, Any] = {"namespace": "team-a", "name": "waits-plan", "labels": {JOB_LABEL: "waits"}}
        await cluster.api.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {}})
        waits = cluster.submit("waits", **SPEC)
        await operator.watch()
        assert operator.condition(waits, "PodsReady") == ("False", "NamesTaken")
        other = cluster.submit("other", **SPEC)
        await operator.watch()
        assert operator.condition(other, "Planned") == ("True", "Planned"), operator.message(other, "Planned")
        await cluster.api.delete(CONFIG_MAP, "team-a", "waits-plan")
        await operator.watch()
        assert operator.condition(waits, "Planned") == ("False", "DeviceBusy")

    on_two_nodes(body)
