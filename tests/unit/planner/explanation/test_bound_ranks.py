"""Tests that plans keep the number of ranks to which a data stream binds a training."""

from dataclasses import replace

import pytest

from dljob.cluster import ClusterView
from dljob.planner import FixedChoice, Request
from dljob.planner.types import Choice
from support.planner_questions import RESNET, decided, rejected, view

LARGE = replace(RESNET, global_batch=192)
THREE = view({"count": 3, "cpu": 2, "memory": "16Gi"})
MANY = view(
    {"count": 60, "device": "NVIDIA-A100-SXM4-40GB", "devices": 1},
    {"count": 60, "device": "NVIDIA-V100-SXM2-16GB", "devices": 1},
    {"count": 60, "device": "Tesla-T4", "devices": 4},
)


def ranks(choice: Choice) -> int:
    return sum(group.nodes * group.ranks_per_node for group in choice.groups)


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_plan_has_the_number_of_ranks_of_the_checkpoint(bound: int) -> None:
    found = decided(replace(LARGE, bound_ranks=bound), THREE)
    assert ranks(found.chosen) == bound and {ranks(each) for each in found.candidates} == {bound}


@pytest.mark.parametrize("bound", [7, 23, 61, 119])
def test_search_of_a_large_cluster_finds_a_plan_with_this_number(bound: int) -> None:
    assert ranks(decided(replace(RESNET, bound_ranks=bound), MANY).chosen) == bound


def test_number_is_the_reason_if_no_plan_is_possible_only_because_of_it() -> None:
    found = rejected(replace(LARGE, bound_ranks=4), THREE)
    assert (found.reason, found.field, found.transient) == ("TooFewNodes", "spec.nodes", True)
    assert "a data stream" in found.message and "nodes for 4 ranks" in found.message
    too_many = rejected(replace(LARGE, nodes_min=4, bound_ranks=4), THREE)
    assert too_many.field == "spec.nodes.min" and "stream" not in too_many.message
    busy = ClusterView((*THREE.nodes[:2], replace(THREE.nodes[2], free_cpu=0.0)))
    assert rejected(replace(LARGE, bound_ranks=3), busy).reason == "DeviceBusy"


@pytest.mark.parametrize("strategy", ["Sharded", "Optimizer", "Auto"])
def test_number_holds_for_each_strategy(strategy: str) -> None:
    request = replace(RESNET, strategy=strategy, bound_ranks=3)  # type: ignore[arg-type]
    assert ranks(decided(request, MANY).chosen) == 3


def test_groups_with_another_number_are_no_plan() -> None:
    fixed = replace(LARGE, fixed=(FixedChoice("cpu", 2),), nodes_min=2)
    assert ranks(decided(replace(fixed, bound_ranks=2), THREE).chosen) == 2
    assert "a data stream" in rejected(replace(fixed, bound_ranks=3), THREE).message


def test_no_rank_becomes_a_parameter_server() -> None:
    """The former worker would not read its stream any more."""
    slow = view({"count": 6, "cpu": 4, "memory": "16Gi", "bandwidth": "10M"})
    free, bound = (decided(replace(RESNET, nodes_min=6, bound_ranks=bound), slow) for bound in (None, 6))
    slower = [[each for each in found.refusals if each.reason.startswith("slower")] for found in (free, bound)]
    assert [any("ParameterServer" in each.summary for each in found) for found in slower] == [True, False]
    served = decided(replace(RESNET, bound_ranks=6, collective="ParameterServer"), slow)
    assert served.chosen.collective == "ParameterServer" and ranks(served.chosen) == 6


def test_plan_without_a_prediction() -> None:
    missing = ("model", "dataset", "globalBatchSize", "epochs")
    unknown = Request(job="j", global_batch=0, total_steps=0, collective="Torch", missing=missing)
    free = replace(unknown, nodes_min=1, nodes_max=3, takes_most=True)
    assert ranks(decided(replace(free, bound_ranks=2), THREE).chosen) == 2
    assert "a data stream" in rejected(replace(free, bound_ranks=4), THREE).message
