"""Tests of the way of a script's memory: a run that reaches its limit, its profile, and the next job of the script."""

from typing import Any

from dlcontract import Plan, PodMemory, Report, RunPhase
from dljob.kube import JobKey
from dljob.kube.kinds import CONFIG_MAP, POD, PROFILE, STATEFUL_SET
from support.builders import NOW
from support.controller.fake_operator import Json, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster

SCRIPT: Json = {
    "trainer": {"command": ["torchrun", "train.py"], "framework": "Torchrun", "image": "registry.example/mine:1"},
    "nodes": {"min": 2},
    "checkpoint": {"enabled": False},
    "runPolicy": {"backoffLimit": 0},
}
OUT_OF_MEMORY = {"reason": "OutOfMemory", "message": "rank 1 was killed", "rank": 1, "exit_code": 137}


async def requested(cluster: FakeCluster, name: str) -> int:
    """Return the memory in MiB that each pod of a job requests."""
    [found] = [s for s in await cluster.api.find(STATEFUL_SET, "team-a") if s["metadata"]["name"].startswith(name)]
    [trainer] = [c for c in found["spec"]["template"]["spec"]["containers"] if c["name"] == "trainer"]
    return int(trainer["resources"]["requests"]["memory"].removesuffix("Mi"))


async def report(cluster: FakeCluster, operator: Operator, key: JobKey, phase: RunPhase, **fields: Any) -> None:
    """Write the report of the job's coordinator, and let the operator react."""
    stored = await cluster.api.get(CONFIG_MAP, key[0], f"{key[1]}-plan")
    plan = Plan.parse(stored["data"]["plan.json"])
    same = {"uid": plan.uid, "plan_number": plan.number, "plan_digest": plan.digest(), "term": plan.term}
    text = Report(phase=phase, unix_s=NOW.timestamp(), step=1, world_size=2, **same, **fields).to_json()
    await cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-report", {"data": {"report.json": text}})
    await operator.watch()


async def delete_pods(cluster: FakeCluster, operator: Operator) -> None:
    """End all pods, as the StatefulSet controller does when a job has ended."""
    for pod in await cluster.api.find(POD, "team-a"):
        await cluster.api.delete(POD, "team-a", pod["metadata"]["name"])
    await operator.watch()


def test_next_job_of_a_script_begins_with_more_than_what_was_too_little_and_then_with_what_was_measured() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        async def submitted(name: str) -> tuple[JobKey, list[str]]:
            key = cluster.submit(name, **SCRIPT)
            await operator.watch()
            pods = await cluster.create_pods(key)
            await cluster.bind(pods, "n1", "n2")
            await operator.watch()
            return key, [pod["metadata"]["name"] for pod in pods]

        key, _ = await submitted("first")
        first = await requested(cluster, "first")
        # Without a restart: the job fails at once.
        await report(cluster, operator, key, RunPhase.FAILED, failures=1, failure=OUT_OF_MEMORY)
        assert operator.condition(key, "Failed") == ("True", "OutOfMemory")
        [profile] = await cluster.api.find(PROFILE, None)
        assert profile["spec"]["namespace"] == "team-a"
        assert profile["status"]["memory"] == [{"ranks": 1, "strategy": "Data", "insufficientBytes": first << 20}]

        await delete_pods(cluster, operator)

        key, pods = await submitted("second")
        second = await requested(cluster, "second")
        assert second == 2 * first and "too little" in operator.message(key, "Planned")
        used = PodMemory(pod=pods[1], ranks=1, peak_nbytes=int(1.5 * first) << 20)
        await report(cluster, operator, key, RunPhase.SUCCEEDED, pod_memory=used)
        assert operator.condition(key, "Complete") == ("True", "Complete")

        await delete_pods(cluster, operator)

        key, _ = await submitted("third")
        third = await requested(cluster, "third")
        assert first < 1.15 * 1.5 * first < third < second
        assert "measured in an earlier run" in operator.message(key, "Planned")
        assert operator.condition(key, "MemoryExceeded") is None

    on_two_nodes(body)
