"""The operator's hardware probes on an API server in memory: pods come and go, and profiles are stored."""

import asyncio
import copy
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dlcontract.hardware import HardwareMeasure, TimedStep
from dljob.controller.hardware_probes import HardwareProbes
from dljob.kube import ApiError, Cache
from dljob.kube.kinds import NODE, POD, PROFILE
from dljob.reconcile.hardware_probes import MAX_STARTS, RETRY_S
from dljob.render import RenderConfig
from support.servers.fake_api import FakeApi

MEASURE = HardwareMeasure(device="A Processor", cores=4, node_cores=4, steps=(TimedStep(net="conv", batch=24, s=0.05),))


class Operator:
    def __init__(self, *nodes: str) -> None:
        self.api, self.cache = FakeApi(), Cache()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.probes = HardwareProbes(
            self.api,  # type: ignore[arg-type]
            self.cache,
            "dljob-system",
            RenderConfig("example.org/trainer:1", "Always"),
            lambda: self.now,
        )
        self.bodies: dict[str, dict[str, Any]] = {}
        size = {"cpu": "4", "memory": "16Gi", "pods": "110"}
        for i, name in enumerate(nodes):
            meta = {"name": name, "uid": f"u{i}", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
            conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
            status = {"allocatable": size, "capacity": size, "conditions": conditions}
            body = {"metadata": meta | {"labels": {}}, "spec": {}, "status": status}
            self.cache.put(NODE, body)
            self.bodies[name] = body

    def upgrade(self, name: str, kernel: str, driver: str = "") -> None:
        """Let a node report a kernel and a driver."""
        labels = {"nvidia.com/cuda.driver-version.full": driver} if driver else {}
        body = copy.deepcopy(self.bodies[name])
        body["metadata"]["labels"] = labels
        body["status"]["nodeInfo"] = {"kernelVersion": kernel}
        self.cache.put(NODE, body)

    def look(self) -> list[dict[str, Any]]:
        asyncio.run(self.probes.look())
        return [body for (plural, _, _), body in self.api.objects.items() if plural == POD.plural]

    def end(self, message: str, phase: str = "Succeeded") -> None:
        for (plural, _, _), body in self.api.objects.items():
            if plural == POD.plural:
                ended = {"terminated": {"message": message, "exitCode": int(phase == "Failed")}}
                body["status"] = {"phase": phase, "containerStatuses": [{"name": "probe", "state": ended}]}

    @property
    def profiles(self) -> list[dict[str, Any]]:
        return [body for (plural, _, _), body in self.api.objects.items() if plural == PROFILE.plural]


def test_a_class_is_measured_once() -> None:
    operator = Operator("n0", "n1")
    (pod,) = operator.look()
    assert pod["metadata"]["namespace"] == "dljob-system"
    (container,) = pod["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("example.org/trainer:1", "Always")
    assert len(operator.look()) == 1, "it still runs"
    operator.end(MEASURE.to_json())
    assert operator.look() == []
    (profile,) = operator.profiles
    assert profile["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "dljob"}
    assert profile["status"]["hardware"]["node"] == "n0"
    operator.now += timedelta(days=1)
    assert operator.look() == []


def test_what_is_no_document_is_not_stored_and_tried_again_later() -> None:
    operator = Operator("n0")
    operator.look()
    operator.end("something else")
    assert operator.look() == []
    assert operator.profiles == []
    assert operator.look() == []
    operator.now += timedelta(hours=1)
    assert len(operator.look()) == 1


def test_a_cluster_that_refuses_the_pod_is_not_asked_without_pause() -> None:
    operator = Operator("n0")
    operator.api.refused.add("Pod")
    try:
        operator.look()
    except ApiError as error:
        assert error.forbidden
    operator.api.refused.clear()
    assert operator.look() == []


def test_a_cluster_without_nodes_is_left_alone() -> None:
    assert Operator().look() == []


def test_class_is_measured_again_after_its_node_got_another_kernel_or_driver() -> None:
    operator = Operator("n0", "n1")
    operator.upgrade("n0", "6.1.0", "550.1")

    def measure() -> None:
        operator.now += timedelta(seconds=RETRY_S)
        assert len(operator.look()) == 1
        operator.end(MEASURE.model_copy(update={"kernel": "of-a-sandbox"}).to_json())
        assert operator.look() == [] and operator.look() == [], "it is measured once"

    measure()
    (profile,) = operator.profiles
    found = profile["status"]["hardware"]
    assert (found["kernel"], found["driver"]) == ("6.1.0", "550.1"), "what the node says, not what the container sees"
    operator.upgrade("n1", "6.9.0", "560.1")
    assert operator.look() == [], "another node was measured"
    for kernel, driver in (("6.9.0", "550.1"), ("6.9.0", "560.1"), ("6.9.1", "560.1"), ("6.9.2", "560.1")):
        operator.upgrade("n0", kernel, driver)
        measure()
        found = operator.profiles[0]["status"]["hardware"]
        assert (found["node"], found["kernel"], found["driver"]) == ("n0", kernel, driver)
    for kernel in ("", "6" * 97):
        operator.upgrade("n0", kernel)
        operator.now += timedelta(seconds=RETRY_S)
        if kernel:
            measure()
            assert operator.profiles[0]["status"]["hardware"]["kernel"] == kernel[:96]
        assert operator.look() == [], "a node that says nothing has not changed"


def test_profiles_that_the_operator_does_not_write_lead_to_no_probe() -> None:
    operator = Operator("n0")
    operator.upgrade("n0", "6.1.0")
    operator.look()
    operator.end(MEASURE.to_json())
    operator.look()
    [own] = operator.profiles
    for name, namespace in (("hardware-of-a-team", "team-a"), ("a-copy", None)):
        other = copy.deepcopy(own)
        other["metadata"] |= {"name": name, "uid": name, "resourceVersion": "1"}
        other["spec"] |= {"namespace": namespace} if namespace else {}
        other["status"]["hardware"]["kernel"] = "5.0.0"
        operator.cache.put(PROFILE, other)
    operator.now += timedelta(days=1)
    assert operator.look() == []


def test_profile_that_cannot_be_parsed_does_not_lead_to_endless_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator("n0")
    monkeypatch.setattr("dljob.controller.hardware_probes.learned_by_model", lambda profiles, namespace: {})
    tries = 0
    for _ in range(10):
        operator.now += timedelta(seconds=RETRY_S)
        tries += len(operator.look())
        operator.end(MEASURE.to_json())
        operator.look()
    assert tries == MAX_STARTS


def test_class_whose_node_is_always_taken_by_jobs_is_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator("n0")
    taken: list[str] = []
    monkeypatch.setattr(operator.cache, "jobs", lambda: iter([SimpleNamespace(key=("default", "job"))]))
    monkeypatch.setattr(operator.cache, "pods_of", lambda key: [SimpleNamespace(node=node) for node in taken])
    for _ in range(2 * MAX_STARTS):
        assert len(operator.look()) == 1
        taken.append("n0")
        assert operator.look() == [], "the probe gives way"
        taken.clear()
        assert operator.look() == [], "not at once"
        operator.now += timedelta(seconds=RETRY_S)
