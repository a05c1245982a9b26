"""Tests of jobs that ask an autoscaler for their nodes with a ProvisioningRequest, before they get pods."""

from datetime import timedelta

import pytest

from dljob.kube.kinds import DLJOB, POD, POD_TEMPLATE, PROVISIONING_REQUEST
from dljob.reconcile.admission.provisioning import RECHECK_S
from support.builders import A100, T4
from support.controller.fake_operator import SPEC, Operator
from support.provisioning.autoscaler import CLASS, Autoscaler
from support.provisioning.waiting_jobs import (
    NEW,
    OTHER,
    TIMEOUT_S,
    Json,
    later,
    on_no_nodes,
    sets,
    waiting,
    with_templates,
)
from support.servers.fake_api import FakeCluster


def test_job_without_room_asks_for_all_its_nodes_and_has_no_pods() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        [request] = await autoscaler.requests()
        [pods] = request["spec"]["podSets"]
        assert request["spec"]["provisioningClassName"] == CLASS and pods["count"] == 2
        template = await cluster.api.get(POD_TEMPLATE, "team-a", pods["podTemplateRef"]["name"])
        for item in (request, template):
            [owner] = item["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"], owner["controller"]) == ("DLJob", "first", True)
        [container] = template["template"]["spec"]["containers"]
        assert container["resources"]["requests"]["nvidia.com/gpu"] == "1"
        assert await sets(cluster) == [] and operator.planned(key) == "Planned"
        assert "ProvisioningRequest" in operator.message(key, "Planned")
        assert "no autoscaler has answered yet" in operator.message(key, "Admitted")
        phase = (await cluster.api.get(DLJOB, *key))["status"]["phase"]
        assert phase == "Pending"

        # Nothing changes while it waits, and its last answer is shown.
        await autoscaler.answer(key, "CA will try to find it later", Accepted=True, Provisioned=False)
        await later(cluster, operator, TIMEOUT_S / 2, key)
        assert "CA will try to find it later" in operator.message(key, "Admitted")
        assert [each["metadata"]["uid"] for each in await autoscaler.requests()] == [request["metadata"]["uid"]]

    on_no_nodes(body)


def test_job_says_that_the_operator_may_not_read_the_answer_of_the_autoscaler() -> None:
    """Fixed bug: it asked for nodes again and again, and said that no autoscaler had answered."""

    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        operator.cache.unread(PROVISIONING_REQUEST, None)
        key = await waiting(cluster, operator)
        assert "may not list" in operator.message(key, "Admitted") and await autoscaler.requests() == []
        await later(cluster, operator, 2 * TIMEOUT_S, key)
        assert operator.condition(key, "Admitted") == ("False", "WaitingForNodes")
        operator.cache.prune(PROVISIONING_REQUEST, (), None)
        await later(cluster, operator, 1.0)
        await operator.watch(RECHECK_S)
        assert len(await autoscaler.requests()) == 1

    on_no_nodes(body)


def test_job_says_that_the_operator_may_not_get_its_request() -> None:
    """Fixed bug: only the log said so, and the job waited without a condition."""

    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        cluster.api.unreadable.add(PROVISIONING_REQUEST.kind)
        key = cluster.submit("first", **SPEC)
        await later(cluster, operator, 1.0, key)
        assert operator.condition(key, "PodsReady") == ("False", "ObjectRejected")
        assert "cannot get provisioningrequests" in operator.message(key, "PodsReady")
        assert await autoscaler.requests() == []

    on_no_nodes(body)


def test_pods_start_when_the_request_is_provisioned_and_name_it() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        await autoscaler.answer(key, Provisioned=True)
        await later(cluster, operator, 5.0, key)
        assert operator.condition(key, "Admitted") == ("True", "Starting")
        [created] = await sets(cluster)
        annotations = created["spec"]["template"]["metadata"]["annotations"]
        assert annotations["autoscaling.x-k8s.io/consume-provisioning-request"] == "first-nodes"
        assert annotations["autoscaling.x-k8s.io/provisioning-class-name"] == CLASS
        [request] = await autoscaler.requests()
        template = await cluster.api.get(
            POD_TEMPLATE, "team-a", request["spec"]["podSets"][0]["podTemplateRef"]["name"]
        )
        assert template["template"]["spec"] == created["spec"]["template"]["spec"]

        # The booking expires as it should when all pods have nodes.
        for name in ("n1", "n2"):
            cluster.node(name, T4, 1)
        await cluster.bind(await cluster.create_pods(key), "n1", "n2")
        await autoscaler.answer(key, BookingExpired=True)
        await later(cluster, operator, 5.0, key)
        assert operator.condition(key, "Admitted") == ("True", "Starting") and len(await autoscaler.requests()) == 1

        # The job stops: the request goes, too.
        await cluster.edit(key, suspend=True)
        await later(cluster, operator, 5.0, key)
        assert await autoscaler.requests() == []

    on_no_nodes(body)


def test_another_operator_continues_to_wait() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        [before] = await autoscaler.requests()
        await operator.__aexit__()
        async with Operator(cluster, config=operator.config) as following:
            await later(cluster, following, 10.0, key)
            assert following.asked == [] and await autoscaler.requests() == [before]
            await autoscaler.answer(key, Provisioned=True)
            await later(cluster, following, 10.0, key)
            assert following.condition(key, "Admitted") == ("True", "Starting") and len(await sets(cluster)) == 1

    on_no_nodes(body)


@pytest.mark.parametrize("condition", ["Failed", "CapacityRevoked", "BookingExpired"])
def test_failed_request_leads_to_a_back_off_and_to_other_nodes(condition: str) -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        [first] = await autoscaler.requests()
        device = (await cluster.api.get(DLJOB, *key))["status"]["plan"]["groups"][0]["device"]
        await autoscaler.answer(key, "no GPU of this type in the zone", **{condition: True})
        await later(cluster, operator, 5.0, key)
        assert operator.condition(key, "Admitted") == ("False", "NodesNotProvided")
        text = operator.message(key, "Admitted")
        assert condition in text and "no GPU of this type in the zone" in text
        assert await autoscaler.requests() == [] and await sets(cluster) == []
        job = await cluster.api.get(DLJOB, *key)
        assert job["status"]["startTimeouts"] == 1 and operator.condition(key, "Failed") is None
        await later(cluster, operator, 1.0, key)
        assert await autoscaler.requests() == [], "it backs off"

        await later(cluster, operator, 60.0, key)
        assert operator.condition(key, "Admitted") == ("False", "WaitingForNodes")
        [second] = await autoscaler.requests()
        assert second["metadata"]["uid"] != first["metadata"]["uid"]
        found = (await cluster.api.get(DLJOB, *key))["status"]["plan"]["groups"][0]["device"]
        assert {device, found} == {T4, A100}, "the next plan uses other nodes"

    on_no_nodes(body, NEW, OTHER)


def test_pods_that_get_no_new_nodes_lead_to_other_nodes_without_requests_too() -> None:
    """Fixed bug: the next plan waited for nodes of the same type, which the cloud did not have."""

    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = cluster.submit("first", **SPEC)
        await later(cluster, operator, 1.0, key)
        assert operator.condition(key, "Admitted") == ("True", "Starting")
        device = (await cluster.api.get(DLJOB, *key))["status"]["plan"]["groups"][0]["device"]
        unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/0 nodes"}
        pods = [pod["metadata"]["name"] for pod in await cluster.create_pods(key)]
        for name in pods:
            await cluster.api.merge(POD, "team-a", name, {"status": {"conditions": [unplaced]}})
        await later(cluster, operator, 1.0, key)
        await later(cluster, operator, TIMEOUT_S, key)
        assert operator.condition(key, "Admitted") == ("False", "StartTimedOut")
        for name in pods:
            await cluster.api.delete(POD, "team-a", name)
        await later(cluster, operator, 60.0, key)
        assert operator.condition(key, "Admitted") == ("True", "Starting")
        found = (await cluster.api.get(DLJOB, *key))["status"]["plan"]["groups"][0]["device"]
        assert {device, found} == {T4, A100}

    on_no_nodes(body, NEW, OTHER, on=False)


def test_only_template_is_tried_again() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        await autoscaler.answer(key, Failed=True)
        await later(cluster, operator, 5.0, key)
        await later(cluster, operator, 60.0, key)
        assert operator.condition(key, "Admitted") == ("False", "WaitingForNodes")
        await autoscaler.answer(key, Provisioned=True)
        await later(cluster, operator, 5.0, key)
        assert operator.condition(key, "Admitted") == ("True", "Starting")

    on_no_nodes(body)


def test_request_that_nobody_answers_ends_with_the_start_time_out() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        operator.now += timedelta(seconds=TIMEOUT_S)
        await operator.watch(TIMEOUT_S + 10.0)  # Nothing but the requeue starts a reconcile.
        assert operator.condition(key, "Admitted") == ("False", "NodesNotProvided")
        assert f"{TIMEOUT_S:g} s" in operator.message(key, "Admitted") and await autoscaler.requests() == []

    on_no_nodes(body)


@pytest.mark.parametrize("condition", ["CapacityRevoked", "BookingExpired"])
def test_pods_that_lose_their_nodes_before_they_are_placed_stop(condition: str) -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        await autoscaler.answer(key, Provisioned=True)
        await later(cluster, operator, 5.0, key)
        cluster.node("n1", T4, 1)
        pods = await cluster.create_pods(key)
        await cluster.bind(pods[:1], "n1")
        await autoscaler.answer(key, "the reservation is over", **{condition: True})
        await later(cluster, operator, 5.0, key)
        assert operator.condition(key, "Admitted") == ("False", "NodesNotProvided")
        assert await autoscaler.requests() == []
        assert [item["spec"]["replicas"] for item in await sets(cluster)] == [0]
        for pod in pods:
            await cluster.api.delete(POD, "team-a", pod["metadata"]["name"])
        await later(cluster, operator, 60.0, key)
        assert operator.condition(key, "Admitted") == ("False", "WaitingForNodes")
        assert len(await autoscaler.requests()) == 1

    on_no_nodes(body)


def test_changed_spec_asks_anew() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        await cluster.edit(key, nodes={"min": 1, "max": 1})
        await later(cluster, operator, 5.0, key)
        await later(cluster, operator, 5.0, key)
        [request] = await autoscaler.requests()
        assert [pods["count"] for pods in request["spec"]["podSets"]] == [1]
        assert operator.condition(key, "Admitted") == ("False", "WaitingForNodes")

    on_no_nodes(body)


@pytest.mark.parametrize("change", [{"suspend": True}, {"planning": {"mode": "PlanOnly"}}])
def test_job_that_no_longer_needs_nodes_withdraws_its_request(change: Json) -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        await cluster.edit(key, **change)
        await later(cluster, operator, 5.0, key)
        assert await autoscaler.requests() == [] and await sets(cluster) == []

    on_no_nodes(body)


def test_request_that_somebody_deletes_is_made_again() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        await cluster.api.delete(PROVISIONING_REQUEST, "team-a", "first-nodes")
        await later(cluster, operator, 5.0, key)
        assert len(await autoscaler.requests()) == 1

    on_no_nodes(body)


def test_waiting_job_reserves_no_nodes() -> None:
    """Its nodes do not exist yet. Another job may use the one that does."""

    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        cluster.node("n1", T4, 1)
        await waiting(cluster, operator, nodes={"min": 3, "max": 3})
        small = cluster.submit("small", "team-b", second=1, **{**SPEC, "nodes": {"min": 1, "max": 1}})
        await later(cluster, operator, 5.0, small)
        assert operator.condition(small, "Admitted") == ("True", "Starting")
        assert await autoscaler.requests("team-b") == []

    on_no_nodes(body, {**NEW, "count": 3})


def test_job_that_got_no_nodes_reserves_none_in_its_back_off() -> None:
    """Fixed bug: it held the existing node for a minute, without pods."""

    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        cluster.node("n1", T4, 1)
        key = await waiting(cluster, operator, nodes={"min": 3, "max": 3})
        await autoscaler.answer(key, Failed=True)
        await later(cluster, operator, 5.0, key)
        assert operator.condition(key, "Admitted") == ("False", "NodesNotProvided")
        small = cluster.submit("small", "team-b", second=1, **{**SPEC, "nodes": {"min": 1, "max": 1}})
        await later(cluster, operator, 5.0, small)
        assert operator.condition(small, "Admitted") == ("True", "Starting")
        assert await autoscaler.requests("team-b") == []

    on_no_nodes(body, {**NEW, "count": 3})


def test_without_the_setting_pending_pods_ask_for_nodes() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = cluster.submit("first", **SPEC)
        await later(cluster, operator, 1.0, key)
        [created] = await sets(cluster)
        assert not any("autoscaling" in name for name in created["spec"]["template"]["metadata"]["annotations"])
        assert await autoscaler.requests() == []

    on_no_nodes(body, on=False)


def test_operator_that_no_longer_uses_requests_starts_the_pods() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        await operator.__aexit__()
        async with Operator(cluster, config=with_templates(NEW, on=False)) as following:
            await later(cluster, following, 10.0, key)
            assert following.condition(key, "Admitted") == ("True", "Starting")
            [created] = await sets(cluster)
            assert not any("autoscaling" in name for name in created["spec"]["template"]["metadata"]["annotations"])
            assert await autoscaler.requests() == []

    on_no_nodes(body)
