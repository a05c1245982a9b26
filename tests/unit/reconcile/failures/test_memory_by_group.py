"""Tests of plans with pods on unlike devices: each group's pods request the memory that they need."""

from dataclasses import replace
from math import ceil

from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.job.reservation import PlannedPods, plan_reservation
from dljob.reconcile import parse_observed
from support.builders import DIGITS, MIXED, Json, after, plan_of, rendered, report, seen, settled
from support.job_lifecycle import condition_of, started, step, verdict

BOTH: Json = {
    **DIGITS, "model": {"name": "resnet18"}, "dataset": {"name": "synthetic-images"}, "globalBatchSize": 96,
    "nodes": {"min": 1, "max": 4}, "collective": "Auto", "planning": {"mode": "Fixed", "groups": [
        {"device": "A100", "nodes": 1, "ranksPerNode": 2}, {"device": "Tesla-T4", "nodes": 1, "ranksPerNode": 1},
    ]},
}  # fmt: skip


def amounts(plan: StoredPlan) -> list[int]:
    return [group.memory_nbytes for group in plan.groups]


def running() -> Observed:
    observed = started(BOTH, view=MIXED)
    observed = replace(observed, report=report(observed))
    return after(observed, step(observed))


def test_pods_and_reservations_of_each_group_have_its_memory() -> None:
    plan = plan_of(running())
    large, small = amounts(plan)
    assert small < large == plan.memory_nbytes and plan.least_memory_nbytes == small
    sets = [item for item in rendered(seen(BOTH, MIXED)) if item["kind"] == "StatefulSet"]
    requests = [item["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"] for item in sets]
    assert requests == [f"{ceil(each / 2**20)}Mi" for each in (large, small)]
    reserved = plan_reservation(PlannedPods.of(plan), BOTH, {})
    assert [each.memory_nbytes for each in reserved if each.device] == [large, small]


def test_a_plan_of_an_earlier_release_gives_all_pods_the_same_memory() -> None:
    plan = plan_of(running()).model_copy(update={"memory_by_group": None})
    assert amounts(plan) == [plan.memory_nbytes] * 2


def test_a_pod_that_reaches_its_limit_gets_twice_its_own_memory() -> None:
    """The pods of the other group keep theirs, which is more."""
    observed = running()
    plan = plan_of(observed)
    large, small = amounts(plan)
    pods = tuple(
        replace(pod, memory_killed_at="2026-03-01T12:00:00Z") if "t4" in pod.name else pod for pod in observed.pods
    )
    first = step(replace(observed, pods=pods))
    message = condition_of(first, "MemoryExceeded").message
    assert verdict(first, "MemoryExceeded") == ("True", "Raising") and f"{small / 2**30:.3g} GiB" in message
    observed = after(observed, first)
    assert parse_observed(observed).memory_to_try[0] == 2 * small
    observed = after(observed, step(observed))
    observed = replace(observed, pods=())
    now = plan_of(settled(after(observed, step(observed))))
    assert amounts(now) == [max(large, 2 * small), 2 * small]
