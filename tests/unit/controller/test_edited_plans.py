"""Tests that a plan that somebody edited is not used: users who may edit ConfigMaps can edit the plans of jobs."""

import json
from typing import Any

import pytest

from dlcontract import FAILURES_KEY, PLAN_KEY
from dljob.job.plan.stored import OPERATOR_KEY
from dljob.kube import JobKey
from dljob.kube.answers import ApiError
from dljob.kube.kinds import CONFIG_MAP, DLJOB, STATEFUL_SET
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster

Json = dict[str, Any]
ONE_NODE: Json = {**SPEC, "nodes": {"min": 1, "max": 1}}
CHOSEN: Json = {"domain": [[{"key": "team", "operator": "In", "values": ["b"]}]], "replans": 1}
"""What a user adds to the plan, so that new pods start, on the nodes of another team."""


async def stored(cluster: FakeCluster, key: JobKey) -> Json:
    return await cluster.api.get(CONFIG_MAP, key[0], f"{key[1]}-plan")


async def edit(cluster: FakeCluster, key: JobKey, **changes: Any) -> None:
    """Change the operator's part of a stored plan, as a user with kubectl."""
    body = await stored(cluster, key)
    text = json.dumps({**json.loads(body["data"][OPERATOR_KEY]), **changes})
    await cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-plan", {"data": {OPERATOR_KEY: text}})


def pod_specs(cluster: FakeCluster) -> list[str]:
    """Return the pod templates of all StatefulSets, as text."""
    sets = (body for (plural, _, _), body in cluster.api.objects.items() if plural == STATEFUL_SET.plural)
    return [json.dumps(item["spec"]["template"]) for item in sets]


def chosen(cluster: FakeCluster) -> bool:
    """Return True if a pod template has what the user added to the plan."""
    return any('"key": "team"' in text for text in pod_specs(cluster))


def warnings(cluster: FakeCluster) -> dict[str, str]:
    """Return reason → message of all warning events."""
    events = (body for (plural, _, _), body in cluster.api.objects.items() if plural == "events")
    return {event["reason"]: event["message"] for event in events if event["type"] == "Warning"}


def test_edited_plan_does_not_choose_nodes() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        await edit(cluster, key, **CHOSEN)
        await operator.watch(15.0)
        assert pod_specs(cluster) and not chosen(cluster)
        message = warnings(cluster)["SignatureWrong"]
        assert "first-plan" in message and "expected" in message

    on_two_nodes(body)


def test_plan_of_a_running_job_is_restored_and_no_pod_restarts() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        before, sets = await stored(cluster, key), await cluster.api.find(STATEFUL_SET, key[0])
        await edit(cluster, key, **CHOSEN)
        await operator.watch(15.0)
        assert (await stored(cluster, key))["data"] == before["data"]
        assert await cluster.api.find(STATEFUL_SET, key[0]) == sets, "no StatefulSet was written"
        assert operator.condition(key, "PlanEdited") == ("False", "PlanRestored")

    on_two_nodes(body)


def test_added_record_of_failures_is_removed() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        before = await stored(cluster, key)
        await cluster.api.merge(CONFIG_MAP, key[0], "first-plan", {"data": {FAILURES_KEY: '{"ignored": 9}'}})
        await operator.watch(15.0)
        assert (await stored(cluster, key))["data"] == before["data"]

    on_two_nodes(body)


@pytest.mark.parametrize("strip", [False, True], ids=["with the old signature", "without a signature"])
def test_plan_edited_while_no_operator_ran_is_not_used(strip: bool) -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        await operator.__aexit__()
        await edit(cluster, key, **CHOSEN)
        if strip:
            await cluster.api.merge(CONFIG_MAP, key[0], "first-plan", {"metadata": {"annotations": None}})
        async with Operator(cluster) as following:
            await following.watch(15.0)
            assert pod_specs(cluster) and not chosen(cluster)
            assert ("SignatureMissing" if strip else "SignatureWrong") in warnings(cluster)
            assert following.planned(key) == "Planned"

    on_two_nodes(body)


def test_edited_plan_of_running_pods_is_planned_anew_without_their_restart() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        await cluster.bind(await cluster.create_pods(key), "n1")
        await operator.watch()
        sets = await cluster.api.find(STATEFUL_SET, key[0])
        await operator.__aexit__()
        await edit(cluster, key, **CHOSEN)
        async with Operator(cluster) as following:
            await following.watch(15.0)
            assert await cluster.api.find(STATEFUL_SET, key[0]) == sets, "no StatefulSet was written"
            assert "team" not in (await stored(cluster, key))["data"][OPERATOR_KEY]
            assert following.condition(key, "PlanEdited") == ("False", "PlanRestored")

    on_two_nodes(body)


def test_plan_that_a_user_stores_before_the_operator_is_not_used() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        second = cluster.submit("second", **ONE_NODE)
        uid = (await cluster.api.get(DLJOB, *second))["metadata"]["uid"]
        forged = json.loads(json.dumps(await stored(cluster, first)).replace("first", "second"))
        owners = [{**forged["metadata"]["ownerReferences"][0], "uid": uid}]
        data = forged["data"]
        data[PLAN_KEY] = json.dumps({**json.loads(data[PLAN_KEY]), "uid": uid})
        data[OPERATOR_KEY] = json.dumps({**json.loads(data[OPERATOR_KEY]), **CHOSEN})
        meta = {"name": "second-plan", "namespace": second[0], "labels": forged["metadata"]["labels"]}
        await cluster.api.create(CONFIG_MAP, {"metadata": {**meta, "ownerReferences": owners}, "data": data})
        await operator.watch(15.0)
        assert len(pod_specs(cluster)) == 2 and not chosen(cluster)
        assert "SignatureMissing" in warnings(cluster)

    on_two_nodes(body)


def test_earlier_plan_of_the_job_is_not_used_again() -> None:
    """Its signature is valid. It may have another number of pods, or an admission by Kueue that has ended."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        earlier = await stored(cluster, key)
        await cluster.edit(key, nodes={"min": 2, "max": 2})
        await operator.watch(15.0)
        later = await stored(cluster, key)
        assert later["data"] != earlier["data"]
        await operator.__aexit__()
        changes = {"data": earlier["data"], "metadata": {"annotations": earlier["metadata"]["annotations"]}}
        await cluster.api.merge(CONFIG_MAP, key[0], "first-plan", changes)
        async with Operator(cluster) as following:
            await following.watch(15.0)
            assert "PlanOutdated" in warnings(cluster)
            assert (await stored(cluster, key))["data"] != earlier["data"]

    on_two_nodes(body)


def test_watch_that_lags_behind_does_not_make_a_plan_outdated() -> None:
    """The next leader may have seen the record in the status, and not the plan that it is of."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        earlier = await stored(cluster, key)
        await cluster.edit(key, nodes={"min": 2, "max": 2})
        await operator.watch(15.0)
        await cluster.bind(await cluster.create_pods(key), "n1", "n2")
        await operator.watch()
        await operator.__aexit__()
        following = Operator(cluster)
        following.cache.drop(CONFIG_MAP, key[0], "first-plan")
        following.cache._deleted.clear()
        following.cache.put(CONFIG_MAP, earlier)
        async with following:
            following.queue.add(key)
            await following.watch(15.0)
            assert following.asked == [] and warnings(cluster).keys() <= {"Replacing"}, "the edit of the spec"

    on_two_nodes(body)


async def _as_an_earlier_release_stored_it(cluster: FakeCluster, key: JobKey) -> None:
    annotations = {name: None for name in (await stored(cluster, key))["metadata"]["annotations"] if "sign" in name}
    await cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-plan", {"metadata": {"annotations": annotations}})
    await cluster.api.merge(DLJOB, *key, {"status": {"planRecord": None}}, subresource="status")


def test_plan_of_an_earlier_release_goes_on_and_is_signed() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        await cluster.bind(await cluster.create_pods(key), "n1")
        await operator.watch()
        await operator.__aexit__()
        await _as_an_earlier_release_stored_it(cluster, key)
        before, sets = await stored(cluster, key), await cluster.api.find(STATEFUL_SET, key[0])
        async with Operator(cluster) as upgraded:
            await upgraded.watch(15.0)
            after = await stored(cluster, key)
            assert after["data"] == before["data"] and "dljob.dev/signature" in after["metadata"]["annotations"]
            assert await cluster.api.find(STATEFUL_SET, key[0]) == sets, "no StatefulSet was written"
            assert upgraded.asked == [] and warnings(cluster) == {}
            await edit(cluster, key, **CHOSEN)
        async with Operator(cluster) as following:
            await following.watch(15.0)
            assert "SignatureWrong" in warnings(cluster), "an unsigned plan counts only once"

    on_two_nodes(body)


def test_jobs_go_on_after_their_key_was_deleted() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        await cluster.bind(await cluster.create_pods(key), "n1")
        await operator.watch()
        before, sets = await stored(cluster, key), await cluster.api.find(STATEFUL_SET, key[0])
        await operator.__aexit__()
        await cluster.delete_plan_key()
        async with Operator(cluster) as following:
            following.queue.add(key)
            await following.watch(15.0)
            after = await stored(cluster, key)
            assert after["data"] == before["data"]
            assert after["metadata"]["annotations"] != before["metadata"]["annotations"], "signed with the new key"
            assert await cluster.api.find(STATEFUL_SET, key[0]) == sets, "no StatefulSet was written"
            assert following.asked == [] and warnings(cluster) == {}

    on_two_nodes(body)


def test_plan_of_a_replica_that_has_another_key_is_no_edit() -> None:
    """Somebody has replaced the key, and only the other replica has read it. The status has no record of the plan."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        await operator.__aexit__()
        await cluster.delete_plan_key()
        async with Operator(cluster) as other:
            other.queue.add(key)
            await other.watch(15.0)
        await cluster.api.merge(DLJOB, *key, {"status": {"planRecord": "0:"}}, subresource="status")
        cluster.listed(operator.cache)
        seen = operator.cache.observe(key)
        assert seen is not None and seen.plan_edit == "SignatureWrong"
        cluster.api.unavailable.add("Secret")
        with pytest.raises(ApiError):
            await operator.kube.observe(key)
        cluster.api.unavailable.clear()
        observed = await operator.kube.observe(key)
        assert observed is not None and observed.plan_edit is None
        assert observed.plan == (await stored(cluster, key))["data"]

    on_two_nodes(body)


def test_plan_counts_that_was_stored_just_before_the_operator_stopped() -> None:
    """The status does not have its record. The signature shows that the operator stored it."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        await cluster.bind(await cluster.create_pods(key), "n1")
        await operator.watch()
        await operator.__aexit__()
        await cluster.api.merge(DLJOB, *key, {"status": {"planRecord": "0:"}}, subresource="status")
        async with Operator(cluster) as following:
            await following.watch(15.0)
            assert following.asked == [] and warnings(cluster) == {}
            status = (await cluster.api.get(DLJOB, *key))["status"]
            assert status["planRecord"] != "0:"

    on_two_nodes(body)
