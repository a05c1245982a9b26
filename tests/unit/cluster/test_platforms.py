"""Tests of nodes with another operating system or processor architecture: nothing counts them, and messages say why."""

import asyncio
from typing import Any

import pytest

from dljob.client import operator_pods, preview
from dljob.cluster.platforms import architecture, platform_error
from dljob.cluster.templates import NodeTemplates
from dljob.job.probes.targets import probe_targets
from dljob.job.scale_up import missing_nodes
from dljob.kube import Cache
from dljob.kube.kinds import NODE, POD
from dljob.scheduling.requests import NOTHING
from support.builders import DIGITS, Json, after, nodes, plan_of, seen
from support.job_lifecycle import condition_of, step
from support.planner_questions import DIGITS as REQUEST
from support.planner_questions import decided, rejected, view
from support.servers.fake_api import FakeApi

LINUX, WINDOWS = {"kubernetes.io/os": "linux"}, {"kubernetes.io/os": "windows"}
AMD, ARM = LINUX | {"kubernetes.io/arch": "amd64"}, LINUX | {"kubernetes.io/arch": "arm64"}
SIZE = {"cpu": 2, "memory": "4Gi"}
REMEDY = "If the images of jobs are built for arm64 too, set nodes.architectures to all of their architectures"


def node(name: str, labels: dict[str, str], **allocatable: str) -> Json:
    found = {"cpu": "2", "memory": "4Gi", **allocatable}
    status = {"allocatable": found, "conditions": [{"type": "Ready", "status": "True"}]}
    meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "labels": labels}
    return {"metadata": meta, "spec": {}, "status": status}


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "amd64"), ("AMD64", "amd64"), ("aarch64", "arm64")])
def test_architectures_have_kubernetes_names(machine: str, name: str) -> None:
    assert architecture(machine) == name


@pytest.mark.parametrize(
    ("labels", "architectures", "words"),
    [
        ({}, ("amd64",), ""),
        (AMD, ("amd64",), ""),
        (ARM, (), ""),
        (ARM, ("amd64", "arm64"), ""),
        ({"kubernetes.io/arch": ""}, ("amd64",), ""),
        (WINDOWS, (), "label kubernetes.io/os: found windows; expected linux"),
        (ARM, ("s390x", "amd64"), "label kubernetes.io/arch: found arm64; expected amd64 or s390x"),
    ],
)
def test_pods_of_jobs_need_linux_and_an_architecture_of_their_image(
    labels: dict[str, str], architectures: tuple[str, ...], words: str
) -> None:
    error = platform_error(labels, architectures)
    assert error is None if not words else error is not None and words in error


@pytest.mark.parametrize("gpus", [{}, {"nvidia.com/gpu": "4"}], ids=["CPUs", "GPUs"])
@pytest.mark.parametrize("labels", [WINDOWS, ARM], ids=["Windows", "arm64"])
def test_nodes_of_other_platforms_have_nothing_for_plans_and_shares(labels: dict[str, str], gpus: Json) -> None:
    cache = Cache(architectures=("amd64",))
    named = labels | ({"nvidia.com/gpu.product": "Tesla-T4"} if gpus else {})
    cache.put(NODE, node("other", named, **gpus))
    assert cache.ledger.total() == NOTHING
    cache.put(NODE, node("plain", {}))
    other, plain = cache.ledger.view().nodes
    assert other.left_out and other.wrong_platform and (other.free_cpu, other.free_memory_nbytes) == (0, 0)
    assert plain.left_out is None and cache.ledger.total().cpu_m == 2000, "a node without the labels counts"


def test_without_a_setting_each_architecture_counts() -> None:
    cache = Cache()
    cache.put(NODE, node("arm", ARM))
    assert cache.ledger.view().nodes[0].left_out is None


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (WINDOWS, "2 x cpu: label kubernetes.io/os: found windows; expected linux"),
        (ARM, "2 x cpu: label kubernetes.io/arch: found arm64; expected amd64"),
    ],
)
def test_plan_names_the_label_if_all_nodes_are_left_out(labels: dict[str, str], words: str) -> None:
    found = rejected(REQUEST, view({"count": 2, **SIZE, "labels": labels}).on_platforms(("amd64",)))
    assert (found.reason, found.transient) == ("TooFewNodes", True) and words in found.message


def test_condition_says_what_was_found_and_how_to_change_it() -> None:
    cluster = nodes({"name": "n", "count": 3, **SIZE, "labels": ARM}).on_platforms(("amd64",))
    message = condition_of(step(seen(DIGITS, cluster)), "Planned").message
    assert "3 x cpu: label kubernetes.io/arch: found arm64; expected amd64" in message and REMEDY in message


def test_probe_measures_no_node_of_another_platform() -> None:
    cluster = view({"name": "w", "cpu": 8, "labels": WINDOWS}, {"name": "a", "cpu": 4, "labels": AMD})
    [target], _ = probe_targets(cluster, {})
    assert (target.node, target.peer) == ("a", None)
    found, why = probe_targets(cluster, {}, node="w")
    assert not found and "expected linux" in why[0]


class TestPods:
    """The scheduler does not know which nodes a plan has counted. New plans keep their pods off the others."""

    @staticmethod
    def requirements(observed: Any) -> list[Json]:
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        [found] = [item for item in step(observed).objects if item["kind"] == "StatefulSet"]
        terms = found["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][key]["nodeSelectorTerms"]
        return [each for term in terms for each in term["matchExpressions"] if each["key"].startswith("kubernetes.io/")]

    def test_pods_avoid_platforms_of_nodes_with_the_device_of_the_plan(self) -> None:
        others = [{"name": "w", **SIZE, "labels": WINDOWS}, {"name": "arm", **SIZE, "labels": ARM}]
        cluster = nodes({"name": "n", "count": 3, **SIZE, "labels": AMD}, *others).on_platforms(("amd64",))
        found = self.requirements(seen(DIGITS, cluster))
        unwanted = [
            {"key": "kubernetes.io/os", "operator": "NotIn", "values": ["windows"]},
            {"key": "kubernetes.io/arch", "operator": "NotIn", "values": ["arm64"]},
        ]
        assert found == 2 * unwanted, "in each of the alternative terms"

    def test_pods_of_clusters_without_such_nodes_stay_as_they_were(self) -> None:
        gpu = {"name": "g", "device": "Tesla-T4", "cpu": 8, "memory": "32Gi", "labels": WINDOWS}
        observed = seen({**DIGITS, "devices": ["cpu"]}, nodes({"name": "n", "count": 3, **SIZE, "labels": AMD}, gpu))
        assert self.requirements(observed) == [] and plan_of(after(observed, step(observed))).domain is None

    def test_an_earlier_plan_keeps_its_pods(self) -> None:
        """An upgrade must not change the pod template of a running job."""
        cluster = nodes({"name": "n", "count": 3, **SIZE, "labels": AMD})
        first = seen(DIGITS, cluster)
        running = after(first, step(first))
        larger = nodes({"name": "n", "count": 3, **SIZE, "labels": AMD}, {"name": "w", **SIZE, "labels": WINDOWS})
        assert self.requirements(after(seen(DIGITS, larger), step(running))) == []


class TestAutoscaling:
    WINDOWS_NODES = nodes({"name": "w", "count": 2, **SIZE, "labels": WINDOWS})

    def test_windows_nodes_are_no_nodes_of_a_template(self) -> None:
        templates = NodeTemplates(nodes({"name": "new", "count": 3, **SIZE}).nodes)
        assert len(templates.scaled_up(self.WINDOWS_NODES).nodes) == 5

    def test_they_do_not_lower_the_number_of_missing_nodes(self) -> None:
        larger = NodeTemplates(nodes({"name": "new", "count": 2, **SIZE}).nodes).scaled_up(self.WINDOWS_NODES)
        decision = decided(REQUEST, larger)
        assert missing_nodes(REQUEST, decision, self.WINDOWS_NODES) == sum(
            group.nodes for group in decision.chosen.groups
        )


class TestPreview:
    """``dljob plan`` uses the setting of the operator, or else the architecture of the node on which it runs."""

    @staticmethod
    def operator(name: str, on: str, architectures: str = "", namespaces: str = "") -> Json:
        values = {"DLJOB_WATCH_NAMESPACES": namespaces, "DLJOB_NODE_ARCHITECTURES": architectures}
        env = [{"name": key, "value": value} for key, value in values.items()]
        labels = {"app.kubernetes.io/name": "dljob"}
        return {
            "metadata": {"name": name, "namespace": "system", "uid": f"uid-{name}", "labels": labels},
            "spec": {"nodeName": on, "containers": [{"name": "operator", "env": env}]},
        }

    def left_out(self, *operators: Json) -> list[str]:
        async def observed() -> preview.ClusterState:
            api = FakeApi()
            for body in (node("amd", AMD), node("arm", ARM), node("win", WINDOWS)):
                await api.create(NODE, body)
            for body in operators:
                await api.create(POD, body)

            async def find(kind: Any, namespace: str | None, **_: str) -> Any:
                return await FakeApi.find(api, kind, namespace)

            api.find = find  # type: ignore[method-assign,assignment]
            return await preview.observe(api)

        found = asyncio.run(observed()).of_job("team-a", "digits")
        return [each.name for each in found.view.nodes if each.left_out]

    @pytest.mark.parametrize(
        ("operators", "expected"),
        [
            ([], ["win"]),
            ([("o", "amd")], ["arm", "win"]),
            ([("o", "arm")], ["amd", "win"]),
            ([("o", "amd", "amd64, arm64")], ["win"]),
            ([("o", "amd"), ("p", "arm")], ["win"]),
            ([("o", "amd", "", "team-b"), ("p", "arm", "", "team-a")], ["amd", "win"]),
        ],
    )
    def test_nodes_that_the_operator_leaves_out(self, operators: list[tuple[str, ...]], expected: list[str]) -> None:
        assert self.left_out(*(self.operator(*each) for each in operators)) == expected

    def test_templates_of_other_architectures_are_left_out(self) -> None:
        body = self.operator("o", "amd", "amd64")
        text = '[{"name": "new", "count": 1, "labels": {"kubernetes.io/arch": "arm64"}}]'
        body["spec"]["containers"][0]["env"].append({"name": "DLJOB_NODE_TEMPLATES", "value": text})
        [new] = operator_pods.templates_of_namespace(operator_pods.operator_pods([body]), "team-a").nodes
        assert new.left_out is not None
