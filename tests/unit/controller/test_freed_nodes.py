"""Tests of jobs that wait for new nodes with a ProvisioningRequest, while existing nodes become free."""

from dljob.controller.planning.growing import LOOK_AGAIN_MISSING_S, LOOK_AGAIN_S
from dljob.kube.kinds import POD
from support.builders import T4
from support.controller.fake_operator import SPEC, Operator
from support.provisioning.autoscaler import Autoscaler
from support.provisioning.waiting_jobs import NEW, later, on_no_nodes, sets, waiting
from support.servers.fake_api import FakeCluster


async def free(cluster: FakeCluster, operator: Operator, *names: str) -> None:
    """Let nodes become free, and wait until each job may have been planned again."""
    for name in names:
        cluster.node(name, T4, 1)
    await operator.watch(2 * LOOK_AGAIN_S)


def test_job_starts_on_nodes_that_another_job_releases_while_it_waits() -> None:
    """Fixed bug: it waited for new nodes, although it had room without them."""

    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        for name in ("n1", "n2"):
            cluster.node(name, T4, 1)
        busy = cluster.submit("busy", **SPEC)
        await operator.watch(1.0)
        pods = await cluster.create_pods(busy)
        await cluster.bind(pods, "n1", "n2")
        key = await waiting(cluster, operator)
        [request] = await autoscaler.requests()
        await operator.watch(2 * LOOK_AGAIN_S)
        assert [each["metadata"]["uid"] for each in await autoscaler.requests()] == [request["metadata"]["uid"]]

        await cluster.edit(busy, suspend=True)
        await operator.watch(1.0)
        for pod in pods:
            await cluster.api.delete(POD, "team-a", pod["metadata"]["name"])
        await operator.watch(2 * LOOK_AGAIN_S)
        assert operator.condition(key, "Admitted") == ("True", "Starting")
        assert await autoscaler.requests() == [] and "ProvisioningRequest" not in operator.message(key, "Planned")
        [created] = [each for each in await sets(cluster) if each["metadata"]["name"].startswith("first")]
        assert not any("autoscaling" in name for name in created["spec"]["template"]["metadata"]["annotations"])

    on_no_nodes(body, {**NEW, "count": 4})


def test_job_keeps_its_request_if_too_few_nodes_become_free() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        [before] = await autoscaler.requests()
        await free(cluster, operator, "n1")
        assert operator.condition(key, "Admitted") == ("False", "WaitingForNodes")
        assert await autoscaler.requests() == [before] and await sets(cluster) == []
        asked = len(operator.asked)
        await operator.watch(LOOK_AGAIN_MISSING_S / 2)
        assert len(operator.asked) == asked, "it is planned again only if more becomes free"

    on_no_nodes(body)


def test_request_stays_while_the_job_is_planned_for_nodes_that_became_free() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        [before] = await autoscaler.requests()
        operator.hangs = key
        await free(cluster, operator, "n1", "n2")
        await later(cluster, operator, 1.0, key)
        assert operator.condition(key, "Admitted") == ("False", "WaitingForNodes")
        assert await autoscaler.requests() == [before]
        operator.hangs = None
        await operator.watch()
        assert operator.condition(key, "Admitted") == ("True", "Starting") and await autoscaler.requests() == []

    on_no_nodes(body)


def test_job_whose_nodes_are_provided_uses_these() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        key = await waiting(cluster, operator)
        await autoscaler.answer(key, Provisioned=True)
        await free(cluster, operator, "n1", "n2")
        [request] = await autoscaler.requests()
        [created] = await sets(cluster)
        annotations = created["spec"]["template"]["metadata"]["annotations"]
        assert annotations["autoscaling.x-k8s.io/consume-provisioning-request"] == request["metadata"]["name"]

    on_no_nodes(body)


def test_of_two_jobs_the_first_in_the_queue_starts_on_nodes_that_become_free() -> None:
    async def body(cluster: FakeCluster, operator: Operator, autoscaler: Autoscaler) -> None:
        second = cluster.submit("second", second=1, **SPEC)
        await operator.watch()
        key = await waiting(cluster, operator)
        assert operator.condition(second, "Admitted") == ("False", "WaitingForNodes")
        await free(cluster, operator, "n1", "n2")
        assert operator.condition(key, "Admitted") == ("True", "Starting")
        assert operator.condition(second, "Admitted") == ("False", "WaitingForNodes")
        assert [each["metadata"]["name"] for each in await autoscaler.requests()] == ["second-nodes"]

    on_no_nodes(body, {**NEW, "count": 4})
