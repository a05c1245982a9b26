"""Tests of plans for jobs about which nothing can be predicted: they take what the spec asks for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import ClusterView
from dljob.cluster.domains import Spot
from dljob.planner import Decision, FixedChoice, Request, plan, scaling
from support.planner_questions import A100, T4, THREE, decided, rejected, view

NOTHING = Request(
    job="j",
    global_batch=0,
    total_steps=0,
    collective="Torch",
    missing=("model", "dataset", "globalBatchSize", "epochs"),
)
GPUS = view(
    {"device": A100, "count": 2, "devices": 8, "cpu": 64, "memory": "512Gi"},
    {"device": T4, "count": 4, "devices": 1, "cpu": 8, "memory": "32Gi"},
    {"device": "cpu", "count": 6, "cpu": 8, "memory": "32Gi"},
)


def shape(found: Decision) -> list[tuple[str, int, int]]:
    return [(group.device, group.nodes, group.ranks_per_node) for group in found.chosen.groups]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(A100, 1, 8)]),
        ({"nodes_min": 2, "nodes_max": 8}, [(A100, 2, 8)]),
        ({"nodes_min": 3}, [(T4, 3, 1)]),
        ({"nodes_min": 1, "nodes_max": 8, "takes_most": True}, [(A100, 2, 8)]),
        ({"nodes_min": 3, "nodes_max": 8, "takes_most": True}, [(T4, 4, 1)]),
        ({"nodes_min": 1, "nodes_max": 3, "takes_most": True, "devices": ("cpu",)}, [("cpu", 3, 1)]),
        ({"nodes_min": 5}, [("cpu", 5, 1)]),
        (
            {"nodes_min": 1, "nodes_max": 3, "takes_most": True, "devices": ("cpu",), "refused_ranks": frozenset({3})},
            [("cpu", 2, 1)],
        ),
        ({"devices": ("t4", "cpu")}, [(T4, 1, 1)]),
        ({"gpus_max": {"nvidia": 4}, "nodes_min": 2}, [(T4, 2, 1)]),
        ({"global_batch": 6}, [(A100, 1, 6)]),
        ({"fixed": (FixedChoice(A100, 1, 4), FixedChoice(T4, 2, 1))}, [(A100, 1, 4), (T4, 2, 1)]),
    ],
)
def test_plan_takes_what_the_request_says(changes: dict[str, object], expected: list[tuple[str, int, int]]) -> None:
    if "gpus_max" in changes:
        expected = [(A100, 2, 2)]
    assert shape(decided(replace(NOTHING, **changes), GPUS)) == expected  # type: ignore[arg-type]


def test_nothing_is_predicted() -> None:
    found = decided(replace(NOTHING, deadline_s=60.0, minimize="Cost"), GPUS)
    p = found.chosen.prediction
    assert (p.step_s, p.total_s, p.samples_per_s, p.cost_usd, p.energy_J) == (0.0, 0.0, 0.0, None, None)
    assert found.candidates == (found.chosen,) and not found.trade_offs
    for words in ("set spec.resources.memory", "objective.deadline is not checked", "minimize Cost has no effect"):
        assert words in (found.warning or "")
    assert scaling(NOTHING, GPUS, {}) == []


def test_memory_is_a_part_of_what_the_node_has() -> None:
    assert decided(NOTHING, THREE).chosen.prediction.host_memory_nbytes == 2 * 2**30
    assert decided(NOTHING, GPUS).chosen.prediction.host_memory_nbytes > 100 * 2**30
    stated = decided(replace(NOTHING, memory_per_pod_nbytes=2**30), THREE)
    assert not stated.warning and stated.chosen.prediction.host_memory_nbytes == 2**30


@pytest.mark.parametrize("changes", [{}, {"fixed": (FixedChoice("cpu", 2, 1),)}])
@pytest.mark.parametrize("names", ["abcd", "cdab", "acbd"])
def test_memory_does_not_depend_on_the_names_of_nodes(names: str, changes: dict[str, object]) -> None:
    """Fixed bug: a pod requested half of the memory of the first node, also if others had more."""
    memory = {"a": "2Gi", "b": "2Gi", "c": "64Gi", "d": "64Gi"}
    cluster = view(*({"name": name, "cpu": 8, "memory": memory[name]} for name in names))
    found = decided(replace(NOTHING, nodes_min=2, **changes), cluster)  # type: ignore[arg-type]
    assert found.chosen.prediction.host_memory_nbytes == 4.25 * 2**30


def test_memory_is_free_on_enough_nodes_with_free_gpus_and_cpus() -> None:
    """Fixed bug: a node without free CPUs counted, so that the pods fitted on one node and not on two."""
    node = {"device": T4, "devices": 4, "cpu": 16}
    roomy = view(*({"name": name, **node, "memory": "128Gi"} for name in "ab"), {"name": "c", **node, "memory": "24Gi"})
    busy, *rest = roomy.nodes
    cluster = ClusterView((replace(busy, free_cpu=2.0), *rest))
    chosen = decided(replace(NOTHING, nodes_min=2), cluster).chosen
    (group,) = chosen.groups
    least = chosen.prediction.host_memory_nbytes
    fitting = [n for n in rest if n.free_memory_nbytes >= least and n.free_cpu >= group.cpu_per_pod]
    assert group.ranks_per_node == 4 and len(fitting) == 2


def test_groups_of_one_device_type_do_not_count_a_node_twice() -> None:
    node = {"device": A100, "devices": 4, "cpu": 32}
    cluster = view({**node, "memory": "512Gi"}, {**node, "memory": "24Gi"})
    both = replace(NOTHING, fixed=(FixedChoice(A100, 1, 4), FixedChoice("a100", 1, 4)))
    assert decided(both, cluster).chosen.prediction.host_memory_nbytes == 12 * 2**30


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"nodes_min": 13}, "TooFewNodes", "spec.nodes.min"),
        ({"nodes_min": 7}, "TooFewNodes", "spec.nodes.min"),
        ({"devices": ("h100",)}, "NoSuchDevice", "spec.devices"),
        ({"fixed": (FixedChoice(A100, 3, 8),)}, "TooFewNodes", "spec.planning.groups[0].nodes"),
        ({"fixed": (FixedChoice("cpu", 2),), "global_batch": 1}, "BatchTooSmall", "spec.globalBatchSize"),
        ({"fixed": (FixedChoice("cpu", 2, 1, 3),), "global_batch": 7}, "BatchMismatch", "spec.planning.groups"),
    ],
)
def test_impossible_request_has_a_reason(changes: dict[str, object], reason: str, field: str) -> None:
    found = rejected(replace(NOTHING, **changes), GPUS)  # type: ignore[arg-type]
    assert (found.reason, found.field) == (reason, field)


def test_spot_nodes_are_avoided() -> None:
    cluster = view({"count": 2, "cpu": 2, "labels": {"spot": "true"}}, {"count": 1, "cpu": 2})
    spot = Spot((("spot", "true"),))
    asked = replace(NOTHING, spot=spot, avoid_spot=True)
    assert decided(asked, cluster).domain.terms
    assert rejected(replace(asked, nodes_min=2), cluster).reason == "TooFewNodes"


@given(nodes=st.integers(1, 6), batch=st.integers(0, 64))
def test_local_batch_sizes_add_up(nodes: int, batch: int) -> None:
    found = plan(replace(NOTHING, nodes_min=nodes, global_batch=batch), GPUS, {})
    if not isinstance(found, Decision):
        assert 0 < batch < nodes
        return
    shares = [share for group in found.chosen.groups for share in group.shares]
    assert sum(group.nodes for group in found.chosen.groups) == nodes
    assert min(shares) >= 1 and max(shares) - min(shares) <= 1
    assert sum(shares) == (batch or len(shares))


def test_groups_with_different_names_of_a_device_take_different_nodes() -> None:
    """Fixed bug: each of them counted all nodes, so that some pods found none."""
    both = (FixedChoice(A100, 1, 4), FixedChoice("a100", 2, 4))
    assert rejected(replace(NOTHING, fixed=both), GPUS).reason == "TooFewNodes"
    assert shape(decided(replace(NOTHING, fixed=(both[0], FixedChoice("a100", 1, 4))), GPUS)) == 2 * [(A100, 1, 4)]


def test_pods_of_fixed_groups_fit_on_the_nodes_of_each_group() -> None:
    """Regression: all pods request the assumed memory of the largest one, which nodes of another group may lack."""
    small = view(
        {"device": A100, "count": 1, "devices": 8, "cpu": 64, "memory": "512Gi"},
        {"device": T4, "count": 2, "devices": 1, "cpu": 8, "memory": "8Gi"},
    )
    found = decided(replace(NOTHING, fixed=(FixedChoice(A100, 1, 8), FixedChoice(T4, 2, 1))), small)
    assert found.chosen.prediction.host_memory_nbytes <= 8 * 2**30
