"""Tests of groups that the user fixes: the planner chooses the cores of their ranks on CPUs, by objective and memory."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.planner import Choice, FixedChoice, Request
from dljob.planner.search.objective import score
from support.planner_questions import DIGITS, RESNET, T4, decided, rejected, view

FOUR = view({"count": 4, "cpu": 16, "memory": "16Gi"})
LARGE = Request(job="j", global_batch=256, total_steps=10, profile="x", parameters=10**6, flops_per_sample=1e10,
                activation_nbytes_per_sample=10**7, collective="HalvingDoubling")  # fmt: skip
UNKNOWN = Request(job="j", global_batch=0, total_steps=0, collective="Torch", missing=("model", "dataset"))


def as_fixed(request: Request, choice: Choice) -> Request:
    groups = tuple(FixedChoice(group.device, group.nodes, group.ranks_per_node) for group in choice.groups)
    return replace(request, fixed=groups)


@pytest.mark.parametrize("minimize", ["Energy", "Cost", "Carbon", "Time"])
def test_cores_of_fixed_groups_serve_the_objective(minimize: Any) -> None:
    """Regression: they were the fastest ones, at up to eight times the cost."""
    request = replace(DIGITS, minimize=minimize, nodes_min=4, nodes_max=4)
    free = decided(request, FOUR).chosen
    found = decided(as_fixed(request, free), FOUR).chosen
    assert found.groups == free.groups
    assert score(request, found.prediction) == pytest.approx(score(request, free.prediction))


def test_cores_of_fixed_groups_fit_into_memory() -> None:
    """Regression: data-loading processes of ranks with the most cores did not fit, so that no plan was possible."""
    cluster = view(
        {"device": "many", "count": 2, "cpu": 16, "memory": "4Gi"},
        {"device": "few", "count": 2, "cpu": 4, "memory": "4Gi"},
    )
    request = replace(LARGE, fixed=(FixedChoice("many", 2, 2), FixedChoice("few", 2, 2)))
    found = decided(request, cluster).chosen
    assert [group.ranks_per_node for group in found.groups] == [2, 2] and found.groups[0].cores < 7
    assert found.prediction.pods_nbytes and max(found.prediction.pods_nbytes) <= 4 * 2**30
    small = rejected(replace(request, global_batch=4096), cluster)
    assert small.reason == "DoesNotFit"


def test_fixed_groups_may_use_the_nodes_with_memory_and_few_cores() -> None:
    cluster = view(
        {"device": "cpu", "count": 2, "cpu": 16, "memory": "2Gi"},
        {"device": "cpu", "count": 2, "cpu": 4, "memory": "64Gi"},
    )
    request = replace(LARGE, global_batch=1024, fixed=(FixedChoice("cpu", 1),), collective=None)
    [group] = decided(request, cluster).chosen.groups
    assert group.cores <= 4


def test_all_combinations_of_cores_of_many_groups_are_not_tried() -> None:
    names = ["a", "b", "c"]
    cluster = view(*({"device": name, "count": 1, "cpu": 64, "memory": "64Gi"} for name in names))
    request = replace(DIGITS, minimize="Cost", fixed=tuple(FixedChoice(name, 1) for name in names))
    assert [group.device for group in decided(request, cluster).chosen.groups] == names
    fastest = decided(replace(request, minimize="Time"), cluster).chosen
    assert score(request, decided(request, cluster).chosen.prediction) < score(request, fastest.prediction)


def test_refusal_counts_only_the_ranks_with_samples() -> None:
    """Regression: '8 samples need 1.4 GiB, but a rank has 1.8 GiB', with 16 samples on the only worker."""
    request = replace(LARGE, global_batch=400, collective="ParameterServer", fixed=(FixedChoice("cpu", 1, 2),))
    wrong = rejected(request, view({"count": 1, "cpu": 2, "memory": "6Gi"}))
    assert wrong.reason == "DoesNotFit" and any("400 samples need" in each.reason for each in wrong.refusals), wrong


def test_ranks_of_fixed_groups_have_a_core_each_if_enough_nodes_do() -> None:
    """Regression: each of four ranks had half a core of a node with four, because another node has only two."""
    cluster = view({"device": "cpu", "count": 2, "cpu": 5}, {"device": "cpu", "count": 1, "cpu": 2})
    [group] = decided(replace(LARGE, fixed=(FixedChoice("cpu", 2, 4),)), cluster).chosen.groups
    assert group.cores == 1 and group.cpu_per_pod <= 4
    [group] = decided(replace(LARGE, fixed=(FixedChoice("cpu", 3, 4),)), cluster).chosen.groups
    assert group.cores == 0.5 and group.cpu_per_pod <= 2


@pytest.mark.parametrize(("strategy", "replicas"), [("Pipeline", 4), ("Tensor", 2)])
def test_ranks_of_a_fixed_replica_share_its_samples(strategy: Any, replicas: int) -> None:
    """Regression: each rank needed a sample of its own, so that groups of the search were rejected if fixed."""
    request = Request(
        job="j", global_batch=6, total_steps=10, model="gpt-mini", dataset="synthetic-tokens", strategy=strategy,
        replicas=replicas, stages=2 if strategy == "Pipeline" else None, micro_batches=1,
        fixed=(FixedChoice("cpu", 4, 2),),
    )  # fmt: skip
    found = decided(request, FOUR).chosen
    assert (found.strategy, found.replicas) == (strategy, replicas)
    assert rejected(replace(request, strategy="Data"), FOUR).reason == "BatchTooSmall"
    assert rejected(replace(request, replicas=8, global_batch=6), FOUR).field


@pytest.mark.parametrize("strategy", ["Pipeline", "Tensor"])
@pytest.mark.parametrize("minimize", ["Energy", "Cost"])
def test_split_models_use_the_cores_that_serve_the_objective(strategy: Any, minimize: Any) -> None:
    """Regression: they used all CPUs of a node, at up to 20 times the cost, or the fastest number in fixed groups."""
    request = Request(
        job="j", global_batch=64, total_steps=100, model="gpt-mini", dataset="synthetic-tokens", strategy=strategy,
        stages=2 if strategy == "Pipeline" else None, micro_batches=8 if strategy == "Pipeline" else 1,
        minimize=minimize, nodes_min=2, nodes_max=2, fixed=(FixedChoice("cpu", 2, 1),),
    )  # fmt: skip
    found = decided(request, FOUR).chosen
    free = decided(replace(request, fixed=()), FOUR).chosen
    all_cpus = decided(replace(request, minimize="Time", fixed=()), FOUR).chosen
    assert score(request, found.prediction) < score(request, all_cpus.prediction)
    assert score(request, free.prediction) <= score(request, found.prediction)


@pytest.mark.parametrize("request_", [RESNET, UNKNOWN], ids=["predicted", "unpredicted"])
@pytest.mark.parametrize(
    ("groups", "fits"),
    [
        ([(1, 1), (1, 4)], True),
        ([(1, 4), (1, 1)], True),
        ([(2, 1), (1, 4)], True),
        ([(1, 2), (1, 2)], False),
        ([(1, 4), (3, 1)], False),
    ],
    ids=str,
)
def test_two_groups_on_one_device_type_find_nodes_of_their_own(
    request_: Request, groups: list[tuple[int, int]], fits: bool
) -> None:
    """Fixed bug: every node of a group counted as one that the next group needs, so that (1, 1), (1, 4) was refused."""
    node = {"device": T4, "cpu": 16, "memory": "128Gi"}
    cluster = view({**node, "count": 1, "devices": 4}, {**node, "count": 2, "devices": 1})
    request_ = replace(request_, fixed=tuple(FixedChoice(T4, nodes, ranks) for nodes, ranks in groups))
    if not fits:
        assert rejected(request_, cluster).field == "spec.planning.groups[1].nodes"
        return
    found = decided(request_, cluster).chosen.groups
    assert [(group.nodes, group.ranks_per_node) for group in found] == groups
