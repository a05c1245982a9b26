"""Tests of the watches: how kopf is set up, and when a change of an object queues its job."""

import asyncio
from typing import Any

import kopf
import pytest

from dljob.controller.watches import kopf_settings
from dljob.controller.watches.affected_jobs import BURST_S, SETTLE_S, AffectedJobs
from dljob.controller.work_queue import WorkQueue
from dljob.job.observed import JOB_LABEL
from dljob.kube import Cache, JobKey
from dljob.kube.kinds import CONFIG_MAP, DLJOB, POD, PRIORITY_CLASS, QUOTA, STATEFUL_SET, VOLUME, Kind
from support.virtual_time import now_s, run


def test_kopf_neither_compares_nor_annotates_jobs() -> None:
    storage = kopf_settings.settings().persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "a"}, "spec": {"epochs": 5}})  # type: ignore[typeddict-item]
    patch = kopf.Patch()
    storage.store(body=body, patch=patch, essence=storage.build(body=body))
    found: tuple[Any, ...] = (dict(storage.build(body=body)), storage.fetch(body=body), dict(patch))
    assert found == ({}, None, {})


def affected(queue: WorkQueue[JobKey], cache: Cache | None = None) -> AffectedJobs:
    return AffectedJobs(cache or Cache(), queue, lambda: None)


def changed(kind: Kind, name: str) -> tuple[Kind, dict[str, Any]]:
    return kind, {"metadata": {"namespace": "team-a", "name": name, "labels": {JOB_LABEL: "digits"}}}


@pytest.mark.parametrize("kind", [POD, STATEFUL_SET])
def test_a_burst_of_pods_queues_their_job_once(kind: Kind) -> None:
    """When 4 pods ended, the job was reconciled and its status written 4 times."""

    async def body() -> tuple[int, float, int]:
        queue = WorkQueue[JobKey]()
        jobs = affected(queue)
        for i in range(4):
            jobs.changed(*changed(kind, f"digits-{i}"))
            await asyncio.sleep(BURST_S / 5)
        at_first = len(queue)
        assert await queue.get() == ("team-a", "digits")
        return at_first, now_s(), len(queue)

    assert run(body()) == (0, pytest.approx(BURST_S), 0)


def test_a_report_queues_its_job_at_once() -> None:
    async def body() -> int:
        queue = WorkQueue[JobKey]()
        affected(queue).changed(*changed(CONFIG_MAP, "digits-report"))
        return len(queue)

    assert run(body()) == 1


def test_a_priority_class_queues_the_jobs_that_name_it() -> None:
    """A job that waits for its class would otherwise start up to 15 s later."""

    async def body() -> tuple[int, JobKey]:
        queue, cache = WorkQueue[JobKey](), Cache()
        for name, spec in (("named", {"scheduling": {"priorityClassName": "urgent"}}), ("other", {})):
            meta = {"namespace": "team-a", "name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
            cache.put(DLJOB, {"metadata": {**meta, "resourceVersion": "1"}, "spec": spec})
        affected(queue, cache).changed(PRIORITY_CLASS, {"metadata": {"name": "urgent"}})
        return len(queue), await queue.get()

    assert run(body()) == (1, ("team-a", "named"))


def test_a_quota_below_its_usage_queues_the_jobs_that_run_in_its_namespace() -> None:
    """Its usage changes with each pod of the namespace, and that alone queues no job."""

    def quota(version: int, used: int, hard: int) -> dict[str, Any]:
        meta = {"namespace": "team-a", "name": "full", "uid": "quota", "resourceVersion": str(version)}
        amounts = {"hard": {"pods": str(hard)}, "used": {"pods": str(used)}}
        return {"metadata": meta, "spec": {"hard": amounts["hard"]}, "status": amounts}

    async def main() -> list[int]:
        queue, cache = WorkQueue[JobKey](), Cache()
        for name in ("runs", "waits"):
            meta = {"namespace": "team-a", "name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
            cache.put(DLJOB, {"metadata": {**meta, "resourceVersion": "1"}, "spec": {}})
        meta = {"namespace": "team-a", "name": "runs-cpu-0", "uid": "pod", "resourceVersion": "1"}
        meta |= {"creationTimestamp": "2026-01-01T00:00:00Z", "labels": {JOB_LABEL: "runs"}}
        cache.put(POD, {"metadata": meta, "spec": {"containers": []}, "status": {}})
        jobs, queued = affected(queue, cache), []
        for version, (used, hard) in enumerate(((1, 4), (2, 4), (2, 1), (3, 1), (3, 4))):
            body = quota(version, used, hard)
            cache.put(QUOTA, body)
            jobs.changed(QUOTA, body)
            queued.append(len(queue))
            if queued[-1]:
                key = await queue.get()
                assert key == ("team-a", "runs")
                queue.done(key)
        return queued

    assert run(main()) == [0, 0, 1, 0, 1]


def test_a_volume_queues_only_jobs_of_its_namespace_that_find_no_node_for_theirs() -> None:
    """A cluster may have thousands of volumes. A burst of them queues each job once."""

    async def main() -> tuple[int, int, JobKey, int]:
        queue, cache = WorkQueue[JobKey](), Cache()
        conflict = {"type": "Planned", "status": "False", "reason": "VolumeNodeConflict"}
        for namespace, name, conditions in (
            ("team-a", "apart", [conflict]),
            ("team-a", "runs", []),
            ("team-b", "apart", [conflict]),
        ):
            meta = {"namespace": namespace, "name": name, "uid": namespace + name, "resourceVersion": "1"}
            meta["creationTimestamp"] = "2026-01-01T00:00:00Z"
            cache.put(DLJOB, {"metadata": meta, "spec": {}, "status": {"conditions": conditions}})
        jobs = affected(queue, cache)
        for i in range(100):
            meta = {"name": f"pv-{i}", "uid": f"pv-{i}", "resourceVersion": "1"}
            spec = {"nodeAffinity": {"required": {"nodeSelectorTerms": []}}, "claimRef": {"namespace": "team-a"}}
            body = {"metadata": meta, "spec": spec}
            assert cache.put(VOLUME, body)
            jobs.changed(VOLUME, body)
        at_first = len(queue)
        await asyncio.sleep(2 * SETTLE_S)
        found = len(queue)
        key = await queue.get()
        queue.done(key)
        await asyncio.sleep(2 * SETTLE_S)
        return at_first, found, key, len(queue)

    assert run(main()) == (0, 1, ("team-a", "apart"), 0)
