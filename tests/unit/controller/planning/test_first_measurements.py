"""First plans wait, for a bounded time, while their devices are measured for the first time."""

from datetime import timedelta

from dlcontract.hardware import HardwareMeasure, TimedStep
from dljob.job.plan.first_plans import WAIT_S
from dljob.job.probes.hardware import hardware_body, hardware_profile
from dljob.kube.kinds import PROFILE
from support.builders import NOW, T4
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster

MEASURE = HardwareMeasure(
    device=T4, kind="gpu", cores=4, node_cores=4, steps=(TimedStep(net="conv", batch=32, s=0.01),)
)


def measured(operator: Operator) -> None:
    """Let a probe end that has measured the nodes' GPUs."""
    meta = {"uid": "hardware", "resourceVersion": "9", "creationTimestamp": "2026-01-01T00:00:00Z"}
    body = hardware_body(hardware_profile(MEASURE, T4, "n1"), T4, NOW + timedelta(seconds=9))
    operator.cache.put(PROFILE, body | {"metadata": body["metadata"] | meta})
    operator.measurements.end(T4)
    operator.planning.capacity_changed()


def test_first_plan_uses_the_measurement_that_runs() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        operator.measurements.begin(T4)
        key = cluster.submit("first", **SPEC)
        await operator.watch(5.0)
        assert operator.condition(key, "Planned") == ("False", "MeasuringHardware")
        assert T4 in operator.message(key, "Planned")
        assert operator.planning.place(key) is None, "it is not in the queue of those that wait for devices"
        measured(operator)
        await operator.watch(3.0)
        assert operator.planned(key) == "Planned"
        job = operator.cache.job(key)
        assert job is not None and job.status["plan"]["predicted"]["basis"] == "probe"

    on_two_nodes(body)


def test_first_plan_waits_no_longer_than_this() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        operator.measurements.begin(T4)
        key = cluster.submit("first", **SPEC)
        await operator.watch(WAIT_S - 1.0)
        assert operator.planned(key) == "MeasuringHardware"
        await operator.watch(3.0)
        assert operator.planned(key) == "Planned"
        job = operator.cache.job(key)
        assert job is not None and job.status["plan"]["predicted"]["basis"] == "catalogue"

    on_two_nodes(body)


def test_measurements_of_other_devices_and_failed_ones_delay_no_plan() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        operator.measurements.begin("another-class")
        operator.measurements.begin(T4)
        operator.measurements.end(T4)
        key = cluster.submit("first", **SPEC)
        await operator.watch(2.0)
        assert operator.planned(key) == "Planned"

    on_two_nodes(body)
