"""The operator's measurement of the network between two nodes, on an API server in memory."""

import copy
from datetime import timedelta
from typing import Any

import pytest

from dlcontract.hardware import LinkRate
from dljob.cluster.hardware import LinkSpeed
from dljob.job.profiles import learned_by_model
from dljob.kube import ApiError
from dljob.kube.kinds import NODE, POD, PROFILE
from dljob.reconcile.probes import MAX_STARTS, RETRY_S
from dljob.render.helpers.probe import NODE_ANNOTATION
from support.controller.probing_operator import MEASURE, Operator

RATE = LinkRate(latency_s=2e-5, Bps=3e9, peer="10.0.0.7")


def measured_hardware() -> Operator:
    """Return an operator that has measured the hardware of its two nodes, and may measure the link now."""
    operator = Operator("n0", "n1", links=True)
    operator.upgrade("n0", "6.1.0")
    operator.look()
    operator.end(MEASURE.to_json())
    assert operator.look() == []
    operator.now += timedelta(seconds=RETRY_S)
    return operator


def on(pods: list[dict[str, Any]]) -> dict[str, str]:
    """Return role → node of the pods of a link."""
    marks = [pod["metadata"]["annotations"] for pod in pods]
    return {mark["dljob.dev/probed-link"]: mark[NODE_ANNOTATION] for mark in marks}


def serve(operator: Operator) -> None:
    """Let the server run."""
    (server,) = (body for (plural, _, name), body in operator.api.objects.items() if plural == POD.plural)
    server["spec"]["nodeName"] = server["metadata"]["annotations"][NODE_ANNOTATION]
    server["status"] = {"phase": "Running", "podIP": "10.0.0.7"}


def answer(operator: Operator, message: str, phase: str = "Succeeded") -> None:
    """Let the client end with a message."""
    for (plural, _, name), body in operator.api.objects.items():
        if plural == POD.plural and name.endswith("-client"):
            ended = {"terminated": {"message": message, "exitCode": int(phase == "Failed")}}
            body["status"] = {"phase": phase, "containerStatuses": [{"name": "probe", "state": ended}]}


def link_of(operator: Operator) -> dict[str, Any] | None:
    (profile,) = operator.profiles
    link: dict[str, Any] | None = profile["status"]["hardware"].get("networkLink")
    return link


def measure(operator: Operator) -> None:
    assert on(operator.look()) == {"server": "n1"}
    serve(operator)
    assert on(operator.look()) == {"server": "n1", "client": "n0"}
    answer(operator, RATE.model_dump_json())
    assert operator.look() == []


def test_link_is_measured_once_between_two_idle_nodes() -> None:
    operator = measured_hardware()
    measure(operator)
    link = link_of(operator)
    assert link is not None
    assert (link["latencySeconds"], link["bandwidthBytesPerSecond"]) == (2e-5, 3e9)
    assert operator.profiles[0]["status"]["hardware"]["steps"], "the rest of the measurement stays"
    assert [event.reason for _, event in operator.events] == ["HardwareMeasured"] * 2
    assert operator.count("measured") == 2 and operator.measurements.left_s() is None
    operator.now += timedelta(days=1)
    assert operator.look() == []


def test_client_connects_to_the_server() -> None:
    operator = measured_hardware()
    operator.look()
    serve(operator)
    for pod in operator.look():
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["priorityClassName"] == "dljob-probes"
        if pod["metadata"]["name"].endswith("-client"):
            assert container["command"][-3:] == ["--peer", "10.0.0.7:28470", "--only-link"]
        else:
            assert "--serve" in container["command"]


def test_link_is_measured_again_with_the_hardware() -> None:
    """The former link remains in the profile until then."""
    operator = measured_hardware()
    measure(operator)
    former = link_of(operator)
    operator.upgrade("n0", "6.9.0")
    operator.now += timedelta(seconds=RETRY_S)
    (pod,) = operator.look()
    assert "dljob.dev/probed-link" not in pod["metadata"]["annotations"], "the hardware comes first"
    operator.end(MEASURE.to_json())
    operator.look()
    assert link_of(operator) == former
    operator.now += timedelta(seconds=RETRY_S)
    measure(operator)
    again = link_of(operator)
    assert again is not None and former is not None and again["measured"] > former["measured"]


@pytest.mark.parametrize(
    ("message", "phase", "why"),
    [
        ("something else", "Succeeded", "expected the document"),
        ("link to 10.0.0.7: timed out; not measured", "Failed", "timed out"),
    ],
)
def test_failed_measurement_leaves_the_profile_and_is_tried_a_few_times(message: str, phase: str, why: str) -> None:
    operator = measured_hardware()
    for tries in range(1, MAX_STARTS + 1):
        assert on(operator.look()) == {"server": "n1"}
        serve(operator)
        operator.look()
        answer(operator, message, phase)
        assert operator.look() == [] and operator.look() == []
        node, event = operator.events[-1]
        assert (node, event.reason) == ("n0", "HardwareNotMeasured")
        assert why in event.message and event.message.startswith("the network between nodes of cpu")
        assert operator.count("failed") == tries
        operator.now += timedelta(seconds=RETRY_S)
    operator.now += timedelta(days=1)
    assert operator.look() == [] and link_of(operator) is None


def test_pod_that_the_scheduler_deletes_takes_the_other_with_it() -> None:
    operator = measured_hardware()
    for tries in range(1, 2 * MAX_STARTS):
        operator.look()
        serve(operator)
        names = [pod["metadata"]["name"] for pod in operator.look()]
        del operator.api.objects[POD.plural, "dljob-system", names[tries % 2]]
        assert operator.look() == [], "neither starts anew at once"
        assert (operator.count("gave_way"), operator.count("failed")) == (tries, 0)
        operator.now += timedelta(seconds=RETRY_S)


def test_client_that_the_api_server_rejects_ends_the_try() -> None:
    operator = measured_hardware()
    operator.look()
    serve(operator)
    operator.api.refused.add("Pod")
    assert operator.look() == []
    assert (operator.count("refused"), len(operator.events)) == (1, 2)
    for _ in range(3):
        assert operator.look() == []
    assert operator.count("refused") == 1


def test_server_without_an_answer_from_the_api_server_is_connected_to_later() -> None:
    operator = measured_hardware()
    operator.look()
    serve(operator)
    operator.api.uncreated["Pod"] = ApiError(503, "ServiceUnavailable", "no leader")
    with pytest.raises(ApiError):
        operator.look()
    operator.api.uncreated.clear()
    assert len(operator.look()) == 1, "not at once"
    operator.now += timedelta(seconds=10)
    assert len(operator.look()) == 2


def test_next_leader_goes_on_with_the_pods_that_it_finds() -> None:
    operator = measured_hardware()
    operator.look()
    serve(operator)
    heir = Operator("n0", "n1", links=True)
    heir.api.objects, heir.now = operator.api.objects, operator.now
    for profile in heir.profiles:
        heir.cache.put(PROFILE, copy.deepcopy(profile))
    assert on(heir.look()) == {"server": "n1", "client": "n0"}
    answer(heir, RATE.model_dump_json())
    assert heir.look() == [] and link_of(heir) is not None


def two_types() -> Operator:
    """Return an operator that has measured the hardware of its two nodes, which are of different types."""
    operator = Operator("n0", "n1", links=True)
    operator.upgrade("n0", "6.1.0")
    body = copy.deepcopy(operator.bodies["n1"])
    body["metadata"]["labels"]["dljob.dev/device"] = "other"
    operator.cache.put(NODE, body)
    operator.look()
    operator.end(MEASURE.to_json())
    assert operator.look() == []
    operator.now += timedelta(seconds=RETRY_S)
    return operator


def measured_links(operator: Operator) -> dict[str, Any]:
    """Return device type → measured links to nodes of other types."""
    return {each["spec"]["device"]: each["status"]["hardware"].get("linksTo", {}) for each in operator.profiles}


def test_link_between_two_types_is_measured_and_stored_in_the_profile_of_the_first() -> None:
    operator = two_types()
    (server,) = operator.look()
    assert server["metadata"]["annotations"]["dljob.dev/probed-peer-device"] == "other"
    measure(operator)
    found = measured_links(operator)
    assert found["cpu"]["other"]["bandwidthBytesPerSecond"] == 3e9 and found["other"] == {}
    known = learned_by_model(operator.profiles, "team-a")["hardware", "cpu"].hardware
    assert known is not None and known.link_to("other") == LinkSpeed(2e-5, 3e9)
    assert operator.events[-1][1].message.startswith("the network between nodes of cpu and other was measured")
    operator.now += timedelta(days=1)
    assert operator.look() == []


def test_link_between_two_types_remains_until_it_is_measured_again() -> None:
    operator = two_types()
    measure(operator)
    former = measured_links(operator)
    operator.upgrade("n0", "6.9.0")
    operator.now += timedelta(seconds=RETRY_S)
    operator.look()
    operator.end(MEASURE.to_json())
    operator.look()
    assert measured_links(operator) == former
    operator.now += timedelta(seconds=RETRY_S)
    measure(operator)
    assert measured_links(operator)["cpu"]["other"]["measured"] > former["cpu"]["other"]["measured"]


def test_links_can_be_switched_off() -> None:
    operator = Operator("n0", "n1", links=False)
    operator.look()
    operator.end(MEASURE.to_json())
    operator.look()
    operator.now += timedelta(days=1)
    assert operator.look() == []
