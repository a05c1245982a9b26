"""Tests of a job that was deleted and created again before the operator looked at it, as ``kubectl replace --force`` does.

Namespaces that are deleted and created again from a repository of manifests have many such jobs.
"""

from typing import Any

from dljob.kube import ApiError, JobKey
from dljob.kube.kinds import APPLIED, DLJOB, SECRET
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster

Json = dict[str, Any]


async def collect(cluster: FakeCluster, key: JobKey) -> None:
    """Delete a job and all that it owns, as the garbage collector does."""
    uid = (await cluster.api.get(DLJOB, *key))["metadata"]["uid"]
    await cluster.api.delete(DLJOB, *key)
    kinds = {kind.plural: kind for kind in APPLIED.values()}
    owned = [
        (plural, namespace, name)
        for (plural, namespace, name), body in cluster.api.objects.items()
        if any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences") or ())
    ]
    for plural, namespace, name in owned:
        if plural in kinds:
            await cluster.api.delete(kinds[plural], namespace, name)
        else:
            del cluster.api.objects[plural, namespace, name]


def secrets(cluster: FakeCluster) -> list[str]:
    return [name for plural, _, name in cluster.api.objects if plural == "secrets" and name.startswith("first")]


def test_job_gets_a_secret_of_its_own() -> None:
    """Fixed bug: its pods waited ten minutes for the Secret with their keys, which had gone with the earlier job."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        [before] = secrets(cluster)
        await collect(cluster, key)
        assert secrets(cluster) == []
        cluster.submit("first", **SPEC)
        await operator.watch(15.0)
        [found] = secrets(cluster)
        assert operator.planned(key) == "Planned" and found != before

    on_two_nodes(body)


def test_events_of_the_earlier_job_are_not_posted_about_the_next_one() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.api.uncreated["Event"] = ApiError(500, "InternalError", "no etcd")
        key = cluster.submit("first", **SPEC, suspend=True)
        await operator.watch()
        await collect(cluster, key)
        del cluster.api.uncreated["Event"]
        cluster.submit("first", **SPEC)
        await operator.watch(30.0)
        posted = {str(each["reason"]) for (plural, _, _), each in cluster.api.objects.items() if plural == "events"}
        assert "Planned" in posted and "Suspended" not in posted

    on_two_nodes(body)


def test_operator_that_leads_again_creates_the_secret_of_a_new_job() -> None:
    """Another operator led meanwhile, so that this one has reconciled neither the end nor the start of the job."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        for name in secrets(cluster):  # The other leader has ended before it created the Secret again.
            await cluster.api.delete(SECRET, "team-a", name)
        operator.controller.begin()
        operator.queue.add(key)
        await operator.watch()
        assert secrets(cluster)

    on_two_nodes(body)
