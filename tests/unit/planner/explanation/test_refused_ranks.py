"""Tests that no plan has a number of ranks on which the script of the job has failed."""

from dataclasses import replace

from dljob.cluster import ClusterView
from dljob.planner import FixedChoice, Request
from support.planner_questions import RESNET, decided, rejected, view

LARGE = replace(RESNET, global_batch=192)
THREE = view({"count": 3, "cpu": 2, "memory": "16Gi"})


def test_no_plan_has_a_number_of_ranks_on_which_the_script_failed() -> None:
    assert decided(LARGE, THREE).chosen.groups[0].nodes == 3
    fewer = decided(replace(LARGE, refused_ranks=frozenset({3})), THREE)
    assert fewer.chosen.groups[0].nodes == 2
    assert all(sum(group.nodes for group in each.groups) != 3 for each in fewer.candidates)


def test_numbers_are_the_reason_if_no_plan_is_possible_only_because_of_them() -> None:
    found = rejected(replace(LARGE, nodes_min=2, refused_ranks=frozenset({2, 3})), THREE)
    assert (found.reason, found.field, found.transient) == ("TooFewNodes", "spec.nodes", True)
    assert "the script failed on 2, 3 ranks" in found.message
    too_many = rejected(replace(LARGE, nodes_min=4, refused_ranks=frozenset({2})), THREE)
    assert too_many.field == "spec.nodes.min" and "script" not in too_many.message


def test_nodes_of_other_jobs_would_make_a_plan_possible() -> None:
    busy = ClusterView((*THREE.nodes[:2], replace(THREE.nodes[2], free_cpu=0.0)))
    found = rejected(replace(LARGE, nodes_min=2, refused_ranks=frozenset({2})), busy)
    assert found.reason == "DeviceBusy" and found.transient


def test_groups_that_kueue_admitted_have_such_a_number() -> None:
    fixed = replace(LARGE, fixed=(FixedChoice("cpu", 2),), nodes_min=2)
    assert decided(fixed, THREE).chosen.groups[0].nodes == 2
    assert "the script failed on 2 ranks" in rejected(replace(fixed, refused_ranks=frozenset({2})), THREE).message


def test_plan_without_a_prediction() -> None:
    missing = ("model", "dataset", "globalBatchSize", "epochs")
    unknown = Request(job="j", global_batch=0, total_steps=0, collective="Torch", missing=missing)
    elastic = replace(unknown, nodes_min=2, nodes_max=3, takes_most=True)
    assert decided(replace(elastic, refused_ranks=frozenset({3})), THREE).chosen.groups[0].nodes == 2
    found = rejected(replace(elastic, refused_ranks=frozenset({2, 3})), THREE)
    assert (found.reason, found.transient) == ("TooFewNodes", True)
    assert "the script failed on 2, 3 ranks" in found.message
