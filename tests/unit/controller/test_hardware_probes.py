"""The operator's hardware probes on an API server in memory: pods come and go, and profiles are stored."""

import asyncio
import copy
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from dlcontract.hardware import HardwareMeasure, TimedStep
from dljob.controller.hardware_probes import HardwareProbes
from dljob.controller.metrics import Metrics
from dljob.job.plan.first_plans import WAIT_S, FirstMeasurements
from dljob.kube import ApiError, Cache
from dljob.kube.kinds import DLJOB, NODE, POD, PROFILE, Kind
from dljob.reconcile.hardware_probes import MAX_STARTS, RETRY_S
from dljob.render import RenderConfig
from dljob.render.helpers.probe import DEVICE_ANNOTATION, NODE_ANNOTATION, PROBE_PRIORITY, configured
from dljob.status import Event
from support.servers.fake_api import FakeApi

MEASURE = HardwareMeasure(device="A Processor", cores=4, node_cores=4, steps=(TimedStep(net="conv", batch=24, s=0.05),))


class Operator:
    def __init__(self, *nodes: str) -> None:
        self.api, self.cache = FakeApi(), Cache()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.metrics, self.events = Metrics(), list[tuple[str, Event]]()
        self.measurements, self.ends = FirstMeasurements(lambda: self.now.timestamp()), 0
        image = configured(RenderConfig("example.org/trainer:1", "Always"), "dljob-probes")
        api: Any = self.api
        self.probes = HardwareProbes(
            api, self.cache, "dljob-system", image, lambda: self.now, self.metrics, self._record, self.measurements,
            self._ended,
        )  # fmt: skip
        self.bodies: dict[str, dict[str, Any]] = {}
        size = {"cpu": "4", "memory": "16Gi", "pods": "110"}
        for i, name in enumerate(nodes):
            meta = {"name": name, "uid": f"u{i}", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
            conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
            status = {"allocatable": size, "capacity": size, "conditions": conditions}
            body = {"metadata": meta | {"labels": {}}, "spec": {}, "status": status}
            self.cache.put(NODE, body)
            self.bodies[name] = body

    async def _record(self, node: str, event: Event, now: datetime) -> None:
        self.events.append((node, event))

    def _ended(self) -> None:
        self.ends += 1

    def count(self, result: str) -> float:
        """Return how many probes have ended with a result."""
        return self.metrics.registry.get_sample_value("dljob_operator_hardware_probes_total", {"result": result}) or 0

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
    assert [(node, event.reason) for node, event in operator.events] == [("n0", "HardwareMeasured")]
    assert (operator.count("measured"), operator.count("failed")) == (1, 0)
    operator.now += timedelta(days=1)
    assert operator.look() == []


@pytest.mark.parametrize(
    ("message", "phase", "why"),
    [
        ("something else", "Succeeded", "expected the document"),
        ("ModuleNotFoundError", "Failed", "ModuleNotFoundError"),
        (MEASURE.model_copy(update={"crowded": 2.5}).to_json(), "Succeeded", "other processes used the node"),
    ],
)
def test_failed_measurement_is_not_stored_and_tried_a_few_times(message: str, phase: str, why: str) -> None:
    operator = Operator("n0")
    for tries in range(1, MAX_STARTS + 1):
        assert len(operator.look()) == 1
        operator.end(message, phase)
        assert operator.look() == []
        assert operator.profiles == []
        assert operator.look() == [], "not at once"
        node, event = operator.events[-1]
        assert (node, event.type, event.reason) == ("n0", "Warning", "HardwareNotMeasured") and why in event.message
        assert (len(operator.events), operator.count("failed")) == (tries, tries)
        operator.now += timedelta(seconds=RETRY_S)
    operator.now += timedelta(days=30)
    assert operator.look() == []


def test_a_cluster_that_refuses_the_pod_is_asked_a_few_times_with_pauses() -> None:
    """A quota of the namespace, or a policy, may refuse it."""
    operator = Operator("n0")
    operator.api.refused.add("Pod")
    for tries in range(1, MAX_STARTS + 1):
        for _ in range(3):
            assert operator.look() == []
        assert operator.count("refused") == len(operator.events) == tries
        operator.now += timedelta(seconds=RETRY_S)
    operator.api.refused.clear()
    assert operator.look() == []


def failed_look(operator: Operator) -> bool:
    """Look once. Return True if the look raised an error of the API server."""
    try:
        operator.look()
    except ApiError:
        return True
    return False


def paces(operator: Operator, seconds: int) -> list[int]:
    """Look each second, and return the seconds between the looks that raised an error."""
    failed = []
    for second in range(seconds):
        if failed_look(operator):
            failed.append(second)
        operator.now += timedelta(seconds=1)
    return [after - before for before, after in pairwise(failed)]


def test_errors_of_the_api_server_use_up_no_tries() -> None:
    """Fixed bug: after three outages, the operator measured nothing before it was restarted."""
    operator = Operator("n0")
    operator.api.uncreated["Pod"] = ApiError(503, "ServiceUnavailable", "no leader")
    assert paces(operator, 400) == [10, 20, 40, 80, 160]
    operator.api.uncreated.clear()
    operator.now += timedelta(seconds=320)
    assert len(operator.look()) == 1
    for tries in range(1, MAX_STARTS + 1):
        operator.end("ModuleNotFoundError", "Failed")
        operator.look()
        assert operator.count("failed") == tries
        operator.now += timedelta(seconds=RETRY_S)
        assert len(operator.look()) == (tries < MAX_STARTS)


def test_a_pod_whose_creation_got_no_answer_uses_up_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator("n0")
    create = operator.api.create

    async def unanswered(kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        created = await create(kind, body)
        if kind is POD:
            raise ApiError(0, "TimeoutError", "")
        return created

    monkeypatch.setattr(operator.api, "create", unanswered)
    for tries in range(1, MAX_STARTS + 1):
        operator.api.created = operator.now.isoformat()
        assert failed_look(operator)
        assert len(operator.look()) == 1, "no second pod"
        operator.end("ModuleNotFoundError", "Failed")
        assert operator.look() == [] and operator.count("failed") == tries
        operator.now += timedelta(seconds=RETRY_S)
    assert operator.look() == []


def test_a_profile_that_is_refused_is_stored_later_with_pauses() -> None:
    """Fixed bug: the request was sent each second, and other probes waited for it."""
    operator = Operator("n0")
    operator.look()
    operator.end(MEASURE.to_json())
    operator.api.refused.add("DLProfile")
    assert paces(operator, 200) == [10, 20, 40, 80]
    operator.api.refused.clear()
    operator.now += timedelta(seconds=160)
    assert operator.look() == [] and len(operator.profiles) == 1


def test_an_error_of_one_probe_does_not_delay_the_end_of_another() -> None:
    operator = Operator("n0")
    operator.look()
    operator.end(MEASURE.to_json())
    operator.api.refused.add("DLProfile")
    late = copy.deepcopy(next(body for (plural, _, _), body in operator.api.objects.items() if plural == POD.plural))
    late["metadata"] |= {"name": "late", "annotations": {**late["metadata"]["annotations"], DEVICE_ANNOTATION: "other"}}
    late["status"] = {"phase": "Failed"}
    operator.api.objects[POD.plural, "dljob-system", "late"] = late
    assert failed_look(operator)
    assert (POD.plural, "dljob-system", "late") not in operator.api.objects


def test_plans_wait_for_the_first_try_only() -> None:
    operator = Operator("n0")

    def awaited() -> bool:
        return bool(operator.measurements.awaited(["cpu"]))

    assert not awaited()
    operator.look()
    assert awaited()
    operator.now += timedelta(seconds=WAIT_S)
    assert not awaited(), "no longer than this"
    operator = Operator("n0")
    operator.look()
    operator.end("out of memory", "Failed")
    operator.look()
    assert not awaited() and operator.ends == 1
    operator.now += timedelta(seconds=RETRY_S)
    assert len(operator.look()) == 1
    assert not awaited(), "the second try delays no plan"


def test_an_operator_without_probe_pods_does_not_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator()
    operator.look()

    async def refuse(*_: object, **__: object) -> list[dict[str, Any]]:
        raise AssertionError("found a list of pods; expected none")

    monkeypatch.setattr(operator.api, "find", refuse)
    assert operator.look() == []


def test_next_leader_counts_the_pod_that_it_finds() -> None:
    operator, heir = Operator("n0"), Operator("n0")
    operator.look()
    heir.api.objects = operator.api.objects
    heir.now += timedelta(seconds=5)
    assert len(heir.look()) == 1
    assert heir.measurements.left_s() is not None
    heir.end("out of memory", "Failed")
    heir.look()
    assert heir.look() == [], "not at once"


def test_pods_have_the_priority_class_and_leave_their_node_to_others() -> None:
    operator = Operator("n0")
    (pod,) = operator.look()
    assert pod["spec"]["priorityClassName"] == "dljob-probes"
    free = operator.cache.ledger.view().nodes[0].free_cpu
    pod["spec"] |= {"nodeName": "n0", "priority": 0}
    operator.cache.put(POD, copy.deepcopy(pod))
    assert operator.cache.ledger.view().nodes[0].free_cpu == free - 1, "without the class, it takes its CPU"
    pod["spec"] |= {"priority": PROBE_PRIORITY}
    operator.cache.put(POD, copy.deepcopy(pod))
    assert operator.cache.ledger.view().nodes[0].free_cpu == free


@pytest.mark.parametrize(
    ("node", "phase", "measured"),
    [
        ("n0", "Running", "n1"),
        ("", "Pending", None),
        ("n0", "Succeeded", "n0"),
        ("n0", "Failed", "n0"),
    ],
)
def test_no_probe_runs_beside_a_look_pod(node: str, phase: str, measured: str | None) -> None:
    """Fixed bug: only the pods that train counted, so that a probe measured a node on which a pod looked at data."""
    operator = Operator("n0", "n1")
    meta = {"name": "iris", "namespace": "ns", "uid": "job", "creationTimestamp": "2026-01-01T00:00:00Z"}
    operator.cache.put(DLJOB, {"metadata": meta, "spec": {"task": {"type": "TabularClassification"}}})
    owner = {"controller": True, "uid": "job", "kind": "DLJob", "name": "iris", "apiVersion": "dljob.dev/v1alpha1"}
    labels = {"dljob.dev/job": "iris", "dljob.dev/look": "true"}
    pod = {"name": "iris-look", "namespace": "ns", "uid": "p", "labels": labels, "ownerReferences": [owner]}
    spec = {"containers": []} | ({"nodeName": node} if node else {})
    operator.cache.put(POD, {"metadata": pod, "spec": spec, "status": {"phase": phase}})
    probes = [body["metadata"]["annotations"][NODE_ANNOTATION] for body in operator.look()]
    assert probes == ([measured] if measured else [])


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


def test_regression_ends_with_the_software_that_it_was_measured_with() -> None:
    """Fixed bug: the operator measured the hardware under another kernel, and the regression stayed in the profile."""
    operator = Operator("n0")
    operator.upgrade("n0", "6.1.0")
    found = []
    for kernel, regression in (("6.1.0", {"networks": 30}), ("6.2.0", {})):
        operator.upgrade("n0", kernel)
        assert len(operator.look()) == 1
        operator.end(MEASURE.to_json())
        assert operator.look() == []
        profile = operator.profiles[0]
        found.append("regression" in profile["status"]["hardware"])
        status = {"hardware": {"regression": regression}}
        answer = asyncio.run(operator.api.merge(PROFILE, None, profile["metadata"]["name"], {"status": status}))
        operator.cache.put(PROFILE, answer)
        operator.now += timedelta(seconds=RETRY_S)
    assert found == [False, False]


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


def test_pod_that_others_deleted_gives_way_and_is_told() -> None:
    """Fixed bug: each pod that the scheduler had preempted counted as a try, and nothing said why none was left."""
    operator = Operator("n0")
    for tries in range(1, 2 * MAX_STARTS):
        assert len(operator.look()) == 1
        operator.api.objects.clear()
        assert operator.look() == [], "not at once"
        assert operator.measurements.left_s() is None and operator.ends == tries, "no plan waits for it any more"
        assert operator.count("gave_way") == tries
        operator.now += timedelta(seconds=RETRY_S)
    operator.look()
    operator.end(MEASURE.to_json())
    for _ in range(3):
        assert operator.look() == []
    assert (operator.count("gave_way"), operator.ends, len(operator.events)) == (tries, tries + 1, 1)


def test_new_measurement_replaces_the_former_one_but_not_the_link_between_nodes() -> None:
    """Fixed bug: what ``dljob probe --structures`` had fitted to the former times remained beside the new ones."""
    operator = Operator("n0")
    operator.upgrade("n0", "6.1.0", "550.1")
    operator.look()
    operator.end(MEASURE.to_json())
    operator.look()
    former = copy.deepcopy(operator.profiles[0])
    link = {"latencySeconds": 1e-4, "bandwidthBytesPerSecond": 1e9}
    more = {"regression": {"networks": 24}, "networkLink": link, "serialFraction": 0.1}
    former["status"]["hardware"] |= more
    operator.api._store(PROFILE, former)
    operator.cache.put(PROFILE, former | {"metadata": former["metadata"] | {"resourceVersion": "99"}})
    operator.upgrade("n0", "6.9.0")
    operator.now += timedelta(seconds=RETRY_S)
    assert len(operator.look()) == 1
    operator.end(MEASURE.to_json())
    operator.look()
    found = operator.profiles[0]["status"]["hardware"]
    assert (found["kernel"], found["networkLink"]) == ("6.9.0", link)
    assert not {"regression", "serialFraction"} & found.keys()
