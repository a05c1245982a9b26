"""Tests of the nodes requested on the command line."""

import os

import pytest

from devcluster.model import ClusterSpec, NodeSpec, parse_cluster, parse_memory, parse_node

MACHINE = {
    "dljob.dev/machine": "development-machine",
    "dljob.dev/machine-cpu": f"{len(os.sched_getaffinity(0)) - 0.15:g}",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", NodeSpec("n1")),
        ("device=cpu-fast,cpu=0.8", NodeSpec("n1", "cpu-fast", 0.8)),
        ("gpu=NVIDIA-A100-SXM4-40GB:2", NodeSpec("n1", gpu_product="NVIDIA-A100-SXM4-40GB", gpus=2)),
        ("name=big,memory=4Gi,cpu=2", NodeSpec("big", cpus=2.0, memory_nbytes=4 << 30)),
    ],
)
def test_node_is_parsed(text: str, expected: NodeSpec) -> None:
    assert parse_node(text, "n1") == expected
    assert parse_node(expected.option, "other") == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("speed=3", "found 'speed=3'; expected KEY=VALUE"),
        ("cpu", "found 'cpu'; expected KEY=VALUE"),
        ("cpu=", "found 'cpu='; expected KEY=VALUE"),
        ("cpu=fast", "expected a number of cores"),
        ("cpu=0", "expected a number of cores"),
        ("cpu=nan", "expected a number of cores"),
        ("cpu=1,cpu=2", "found the key cpu twice"),
        ("memory=4GB", "expected a quantity such as 4Gi"),
        ("gpu=A100", "expected PRODUCT:COUNT"),
        ("gpu=A100:0", "expected PRODUCT:COUNT"),
        ("gpu=A 100:1", "a GPU product label: found"),
        ("device=-x", "a device label: found"),
        ("name=Node_1", "a node's name: found"),
    ],
)
def test_invalid_node_is_rejected_with_the_expectation(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_node(text, "n1")


def test_labels_match_those_of_gpu_feature_discovery() -> None:
    assert parse_node("gpu=Tesla-T4:4", "n1").labels == {
        "dljob.dev/device": "cpu",
        "nvidia.com/gpu.product": "Tesla-T4",
        "nvidia.com/gpu.count": "4",
        **MACHINE,
    }


def test_labels_say_that_all_nodes_share_the_cores_of_this_machine() -> None:
    labels = [parse_node(text, "n1").labels for text in ("", "device=cpu-slow,cpu=0.2")]
    assert all(MACHINE.items() <= each.items() for each in labels)


@pytest.mark.parametrize(
    ("nodes", "count", "names"),
    [
        ([], None, ["n1", "n2", "n3"]),
        ([], 2, ["n1", "n2"]),
        (["device=a"], None, ["n1"]),
        (["device=a"], 3, ["n1", "n2", "n3"]),
        (["name=x", "", "name=y"], None, ["x", "n2", "y"]),
    ],
)
def test_number_and_names_of_nodes(nodes: list[str], count: int | None, names: list[str]) -> None:
    assert [node.name for node in parse_cluster("dev", nodes, count).nodes] == names


@pytest.mark.parametrize(
    ("name", "nodes", "count", "complaint"),
    [
        ("dev", ["", "", ""], 2, "--nodes: found 2; expected a number of nodes from 3"),
        ("dev", [], 0, "--nodes: found 0; expected a number of nodes from 1"),
        ("dev", [], 51, "from 1 .* to 50"),
        ("dev", ["name=a", "name=a"], None, "two nodes with the name 'a'"),
        ("dev", ["name=n2", ""], None, "two nodes with the name 'n2'"),
        ("a.b", [], None, "a cluster's name: found"),
        ("../x", [], None, "a cluster's name: found"),
    ],
)
def test_invalid_cluster_is_rejected(name: str, nodes: list[str], count: int | None, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_cluster(name, nodes, count)


@pytest.mark.parametrize(("text", "nbytes"), [("1", 1), ("1k", 1000), ("1.5Gi", 3 << 29), ("512M", 512_000_000)])
def test_memory_is_parsed(text: str, nbytes: int) -> None:
    assert parse_memory(text) == nbytes


def test_specification_round_trips_through_its_record() -> None:
    spec = parse_cluster("dev", ["gpu=Tesla-T4:4,memory=1Gi", "device=cpu-slow,cpu=0.2"], 3)
    assert ClusterSpec.from_json(spec.to_json()) == spec
