"""Tests of pods that no scheduler looks at, and of pods that two schedulers place on the same node."""

from datetime import timedelta
from typing import Any

import pytest

from dljob.kube import JobKey
from dljob.kube.kinds import DLJOB, POD, STATEFUL_SET
from dljob.reconcile.gang import FIRST_BACK_OFF_S, MAX_REJECTIONS, START_TIMEOUT_S
from dljob.status.pods import NO_SCHEDULER_S
from support.builders import T4
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster

Json = dict[str, Any]
NO_CPU = "Node didn't have enough resource: cpu, requested: 4000, used: 14000, capacity: 16000"
STEP_S = 10.0


async def later(cluster: FakeCluster, operator: Operator, seconds: float, *keys: JobKey) -> None:
    """Let time pass, also for the wall clocks. Reconcile the jobs now and then."""
    for _ in range(max(1, int(seconds / STEP_S))):
        operator.now += timedelta(seconds=min(seconds, STEP_S))
        cluster.now = operator.now
        for key in keys:
            operator.queue.add(key)
        await operator.watch(min(seconds, STEP_S))


async def replicas(cluster: FakeCluster, key: JobKey) -> int:
    return sum(item["spec"]["replicas"] for item in await cluster.api.find(STATEFUL_SET, key[0]))


def reasons(cluster: FakeCluster) -> set[str]:
    """Return the reasons of all events."""
    return {body["reason"] for (plural, _, _), body in cluster.api.objects.items() if plural == "events"}


async def other_pod(cluster: FakeCluster, name: str, node: str) -> None:
    """Let another scheduler place a pod that needs the device of a node."""
    container = {"name": "a", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
    meta = {"name": name, "namespace": "others"}
    await cluster.api.create(
        POD, {"metadata": meta, "spec": {"nodeName": node, "containers": [container]}, "status": {"phase": "Running"}}
    )


@pytest.mark.parametrize("reason", ["OutOfcpu", "OutOfmemory", "OutOfnvidia.com/gpu", "UnexpectedAdmissionError"])
def test_rejected_pod_is_named_and_does_not_count_as_a_failure(reason: str) -> None:
    """Fixed bug: the condition PodsReady said Starting, and the start time-out did not apply."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        first, second = await cluster.create_pods(key)
        await cluster.bind([first], "n1")
        await cluster.reject(second, "n2", reason, NO_CPU)
        await later(cluster, operator, 1.0, key)
        assert operator.condition(key, "PodsReady") == ("False", "RejectedByNode")
        text = operator.message(key, "PodsReady")
        assert all(words in text for words in ("node n2", second["metadata"]["name"], reason, NO_CPU)), text
        assert operator.condition(key, "Admitted") == ("True", "Starting") and "RejectedByNode" in reasons(cluster)
        status = (await cluster.api.get(DLJOB, *key))["status"]
        assert not status.get("failures") and await replicas(cluster, key) == 2

        # Its replacement finds a place.
        [again] = await cluster.replace_failed(key)
        await later(cluster, operator, 1.0, key)
        assert operator.condition(key, "PodsReady") == ("False", "RejectedByNode"), "it is not placed yet"
        await cluster.bind([again], "n2")
        await later(cluster, operator, 1.0, key)
        assert operator.condition(key, "PodsReady") == ("False", "Starting")

    on_two_nodes(body)


def test_rejection_that_no_reconcile_saw_is_remembered() -> None:
    """The StatefulSet controller replaces a failed pod at once."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        pods = await cluster.create_pods(key)
        await cluster.reject(pods[0], "n1", "OutOfcpu", NO_CPU)
        await cluster.replace_failed(key)
        await later(cluster, operator, 1.0, key)
        assert operator.condition(key, "PodsReady") == ("False", "RejectedByNode")

    on_two_nodes(body)


def test_pods_that_nodes_reject_again_and_again_stop_and_the_job_is_planned_anew() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        await cluster.bind((await cluster.create_pods(key))[:1], "n1")
        for i in range(MAX_REJECTIONS):
            assert operator.condition(key, "Admitted") == ("True", "Starting"), i
            pending = [pod for pod in await cluster.api.find(POD, key[0]) if "nodeName" not in pod["spec"]]
            await cluster.reject(pending[0], "n2", "OutOfcpu", NO_CPU)
            await later(cluster, operator, 1.0, key)
            await cluster.replace_failed(key)
        assert operator.condition(key, "Admitted") == ("False", "RejectedByNodes")
        assert "OutOfcpu" in operator.message(key, "Admitted") and await replicas(cluster, key) == 0
        for pod in await cluster.api.find(POD, key[0]):
            await cluster.api.delete(POD, key[0], pod["metadata"]["name"])

        # The other scheduler's pod is on n2 now, so there is no room for two pods after the back-off.
        await other_pod(cluster, "other", "n2")
        await later(cluster, operator, 2 * FIRST_BACK_OFF_S, key)
        assert operator.planned(key) == "DeviceBusy" and await replicas(cluster, key) == 0
        cluster.node("n3", T4, 1)
        await later(cluster, operator, 4 * STEP_S, key)
        assert operator.condition(key, "Admitted") == ("True", "Starting") and await replicas(cluster, key) == 2
        await cluster.create_pods(key)
        await later(cluster, operator, STEP_S, key)
        assert operator.condition(key, "PodsReady") == ("False", "Starting"), "earlier rejections do not count"

    on_two_nodes(body)


@pytest.mark.parametrize("named", ["volcano", None])
def test_pod_that_no_scheduler_looks_at(named: str | None) -> None:
    """Fixed bug: the job stayed at Starting without a reason, and without a start time-out."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        spec = SPEC if named is None else {**SPEC, "scheduling": {"schedulerName": named}}
        key = cluster.submit("first", **spec)
        await operator.watch()
        await cluster.create_pods(key)
        await later(cluster, operator, 1.0, key)
        assert operator.condition(key, "PodsReady") == ("False", "Starting")
        operator.now += timedelta(seconds=NO_SCHEDULER_S)
        await operator.watch(NO_SCHEDULER_S)  # Nothing but the requeue starts a reconcile.
        assert operator.condition(key, "PodsReady") == ("False", "NoScheduler")
        assert repr(named or "default-scheduler") in operator.message(key, "PodsReady")
        await later(cluster, operator, START_TIMEOUT_S, key)
        assert operator.condition(key, "Admitted") == ("False", "StartTimedOut")
        assert await replicas(cluster, key) == 0

    on_two_nodes(body)


def test_pod_for_which_a_scheduler_found_no_node_is_not_reported_as_without_scheduler() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        for pod in await cluster.create_pods(key):
            item = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
            await cluster.api.merge(POD, key[0], pod["metadata"]["name"], {"status": {"conditions": [item]}})
        await later(cluster, operator, 2 * NO_SCHEDULER_S, key)
        assert operator.condition(key, "PodsReady") == ("False", "Unschedulable")

    on_two_nodes(body)
