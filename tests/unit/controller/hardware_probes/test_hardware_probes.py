"""The operator's hardware probes on an API server in memory: pods come and go, and profiles are stored."""

import asyncio
import copy
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dljob.job.plan.first_plans import WAIT_S
from dljob.job.profiles import learned_by_model
from dljob.kube.kinds import DLJOB, POD, PROFILE
from dljob.reconcile.probes import MAX_STARTS, RETRY_S
from dljob.render.helpers.probe import NODE_ANNOTATION, PROBE_PRIORITY
from support.controller.probing_operator import MEASURE, Operator


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


def test_operator_that_leads_again_finds_the_pods_of_the_leader_between() -> None:
    """Fixed bug: such a pod stayed, also on a node that a job needed, and what it had measured was lost."""
    operator, between = Operator(), Operator("n0")
    assert operator.look() == []
    between.look()
    between.end(MEASURE.to_json())
    operator.api.objects = between.api.objects
    assert len(operator.look()) == 1, "an operator without probe pods does not ask for them"
    operator.probes.begin()
    assert operator.look() == [] and len(operator.profiles) == 1


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
    monkeypatch.setattr("dljob.controller.hardware_probes.probes.learned_by_model", lambda profiles, namespace: {})
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


def measured() -> tuple[Operator, dict[str, Any]]:
    """Return an operator that has measured a node, and a copy of the profile."""
    operator = Operator("n0")
    operator.upgrade("n0", "6.1.0", "550.1")
    operator.look()
    operator.end(MEASURE.to_json())
    operator.look()
    former = copy.deepcopy(operator.profiles[0])
    return operator, former


def measure_again(operator: Operator, former: dict[str, Any]) -> None:
    """Store ``former`` in place of the profile, and measure the node again after a new kernel."""
    operator.api._store(PROFILE, former)
    operator.cache.put(PROFILE, former | {"metadata": former["metadata"] | {"resourceVersion": "99"}})
    operator.upgrade("n0", "6.9.0")
    operator.now += timedelta(seconds=RETRY_S)
    assert len(operator.look()) == 1
    operator.end(MEASURE.to_json())
    operator.look()


def test_new_measurement_replaces_the_former_one_but_not_the_link_between_nodes() -> None:
    """Fixed bug: what ``dljob probe --structures`` had fitted to the former times remained beside the new ones."""
    operator, former = measured()
    link = {"latencySeconds": 1e-4, "bandwidthBytesPerSecond": 1e9}
    more = {"regression": {"networks": 24}, "networkLink": link, "serialFraction": 0.1}
    former["status"]["hardware"] |= more
    measure_again(operator, former)
    found = operator.profiles[0]["status"]["hardware"]
    assert found["kernel"] == "6.9.0"
    assert found["networkLink"] == {**link, "measured": former["status"]["updated"]}, "not measured now"
    assert not {"regression", "serialFraction"} & found.keys()


def test_stored_link_that_is_not_valid_goes_with_the_next_measurement() -> None:
    """Fixed bug: the operator kept it, so that the new measurement was as useless as the former one."""
    operator, former = measured()
    former["status"]["hardware"]["networkLink"] = {"latencySeconds": 0, "bandwidthBytesPerSecond": 1e9}
    measure_again(operator, former)
    assert "networkLink" not in operator.profiles[0]["status"]["hardware"]
    assert learned_by_model(operator.profiles, "team-a")["hardware", "cpu"].hardware is not None
