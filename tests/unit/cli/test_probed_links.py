"""Tests of ``dljob probe --link``: the network between nodes of one type, and of two types of a kind."""

import asyncio
from typing import Any

import pytest

from dlcontract.hardware import LinkRate
from dljob.cli import probe_pods
from dljob.cli.commands import probe
from dljob.cli.entry import parser
from dljob.job.observed import JOB_LABEL
from dljob.job.probes.links import links_to_measure
from dljob.job.probes.targets import Target
from dljob.kube.kinds import NODE, POD, PROFILE
from dljob.render.helpers.probe import BY_COMMAND, PROBE_LABEL, ProbeImage, link_client_pod
from support.servers.fake_api import FakeApi
from support.servers.probed_cluster import MEASURE, OPERATOR, Kubelet, node

LINK = LinkRate(latency_s=4.5e-5, Bps=1.1e9)
Json = dict[str, Any]


class Network(Kubelet):
    """An API server whose pods that measure only a link end with ``link``."""

    def __init__(self, link: str = LINK.model_dump_json()) -> None:
        super().__init__(MEASURE.to_json())
        self.link, self.bodies = link, list[Json]()

    async def create(self, kind: Any, body: Any) -> Any:
        self.bodies.append(body)
        return await super().create(kind, body)

    async def get(self, kind: Any, namespace: str | None, name: str) -> Any:
        found = await super().get(kind, namespace, name)
        if kind is POD and "peer" not in name:
            command = found["spec"]["containers"][0]["command"]
            far = LINK if "--peer" in command else None
            hardware = MEASURE.model_copy(update={"far": far}).to_json()
            ended = found["status"]["containerStatuses"][0]["state"]["terminated"]
            ended["message"] = self.link if "--only-link" in command else hardware
        return found

    async def merge(self, *arguments: Any, owner: str = "", **options: Any) -> Any:
        return await super().merge(*arguments, **options)

    @property
    def links(self) -> dict[str, Json]:
        """Return type → the links in its profile."""
        found = {}
        for (plural, _, _), body in self.objects.items():
            if plural == PROFILE.plural:
                hardware = body["status"]["hardware"]
                far = {body["spec"]["device"]: hardware["networkLink"]} if "networkLink" in hardware else {}
                found[body["spec"]["device"]] = far | hardware.get("linksTo", {})
        return found

    def between(self) -> list[tuple[str, str]]:
        """Return the nodes of the pods in the order of their creation, with what each pod does."""
        found = []
        for body in self.bodies:
            command = body["spec"]["containers"][0]["command"]
            does = "serves" if "--serve" in command else "link" if "--only-link" in command else "hardware"
            found.append((body["metadata"]["annotations"]["dljob.dev/probed-node"], does))
        return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_pods, "LOOK_S", 0.01)


def network(*nodes: Json, link: str = LINK.model_dump_json()) -> Network:
    api = Network(link)

    async def fill() -> None:
        for each in nodes:
            await FakeApi.create(api, NODE, each)
        await FakeApi.create(api, POD, OPERATOR)

    asyncio.run(fill())
    return api


def run(api: Network, *arguments: str) -> int:
    api.bodies.clear()
    return asyncio.run(probe._in_cluster(api, parser().parse_args(["probe", *arguments])))


def job_on(api: Network, name: str) -> None:
    body = {
        "metadata": {"namespace": "team", "name": f"job-{name}", "labels": {JOB_LABEL: "job"}},
        "spec": {"nodeName": name, "containers": []},
        "status": {"phase": "Running"},
    }
    asyncio.run(FakeApi.create(api, POD, body))


def test_links_within_each_type_and_between_types_are_measured_and_stored(capsys: pytest.CaptureFixture[str]) -> None:
    api = network(node("a1", "a"), node("a2", "a"), node("b1", "b"))
    assert run(api, "--link") == 0
    assert api.between() == [
        ("a2", "serves"), ("a1", "hardware"), ("b1", "hardware"), ("b1", "serves"), ("a1", "link"),
    ]  # fmt: skip
    assert {device: set(links) for device, links in api.links.items()} == {"a": {"a", "b"}, "b": set()}
    assert api.links["a"]["b"]["latencySeconds"] == 4.5e-5 and api.links["a"]["b"]["measured"]
    out = capsys.readouterr().out
    assert "network between nodes of a and b: a1 and b1" in out and "1.1 GB/s" in out and "45 us" in out
    assert not api.pods, "both pods are deleted"
    assert run(api, "--link") == 0 and not api.bodies, "nothing is left to measure"


def test_without_the_option_no_link_is_measured_and_stored_ones_stay() -> None:
    """Fixed bug: a later measurement without ``--link`` deleted the link that an earlier one had measured."""
    api = network(node("a1", "a"), node("a2", "a"), node("b1", "b"))
    assert run(api, "--link") == 0
    before = api.links
    assert run(api, "--device", "a") == 0
    assert api.between() == [("a1", "hardware")] and api.links == before
    assert run(api, "--link") == 0, "they are older than the hardware"
    assert api.between() == [("a2", "serves"), ("a1", "link"), ("b1", "serves"), ("a1", "link")]


def test_link_within_a_type_that_was_measured_before_is_measured_too() -> None:
    api = network(node("a1", "a"), node("a2", "a"))
    assert run(api) == 0 and api.links == {"a": {}}
    assert run(api, "--link") == 0
    assert api.between() == [("a2", "serves"), ("a1", "link")] and set(api.links["a"]) == {"a"}


@pytest.mark.parametrize(
    ("arguments", "pairs"), [((), {"b", "c"}), (("--device", "c"), {"c"}), (("--node", "b1"), {"b"})]
)
def test_only_links_of_the_named_types_are_measured(arguments: tuple[str, ...], pairs: set[str]) -> None:
    api = network(node("a1", "a"), node("b1", "b"), node("c1", "c"))
    assert run(api) == 0
    assert run(api, "--link", *arguments) == 0
    assert set(api.links["a"]) == pairs


def test_types_of_different_kinds_have_no_link() -> None:
    gpu = node("g1")
    gpu["metadata"]["labels"] = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "kubernetes.io/hostname": "g1"}
    gpu["status"]["allocatable"] = gpu["status"]["capacity"] = {**gpu["status"]["capacity"], "nvidia.com/gpu": "1"}
    api = network(node("a1", "a"), gpu)
    assert run(api, "--link", "--device", "a") == 0
    assert api.links["a"] == {}


def test_busy_and_annotated_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    api = network(node("a1", "a"), node("b1", "b"))
    assert run(api) == 0
    job_on(api, "b1")
    assert run(api, "--link") == 1 and not api.bodies
    assert "network between nodes of a and b: not measured, because no two nodes are idle" in capsys.readouterr().err
    known = [node("a1", "a"), node("b1", "b")]
    for each in known:
        each["metadata"]["annotations"] = {"dljob.dev/network-bandwidth": "3125M"}
    api = network(*known)
    assert run(api) == 0 and run(api, "--link") == 0 and not api.bodies
    assert "because annotations of nodes give its bandwidth" in capsys.readouterr().err


def test_document_that_is_no_link_is_one_line_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    api = network(node("a1", "a"), node("b1", "b"), link="no JSON")
    assert run(api, "--link") == 1
    assert "found 'no JSON' in the termination message of pod dljob-probe-link-" in capsys.readouterr().err
    assert not api.pods and api.links == {"a": {}, "b": {}}


def test_operator_does_not_take_the_pods_of_the_command_for_its_own() -> None:
    target = Target("a", False, "a1", 4.0, "b1", "b")
    pod = link_client_pod("p", "ns", target, ProbeImage("i"), "10.0.0.7", by=BY_COMMAND)
    assert pod["metadata"]["labels"][PROBE_LABEL] == BY_COMMAND


def test_links_without_two_nodes_are_left_out() -> None:
    api = network(node("a1", "a"), node("b1", "b"))
    assert run(api) == 0
    profiles = [body for (plural, _, _), body in api.objects.items() if plural == PROFILE.plural]
    assert links_to_measure(profiles, (), {"a": 1, "b": 1}) == [("a", "b")]
    assert links_to_measure(profiles, (), {"a": 2, "b": 2}) == [("a", "a"), ("b", "b"), ("a", "b")]
    assert links_to_measure(profiles, (), {"a": 2}) == [("a", "a")], "the nodes of the other type are gone"
