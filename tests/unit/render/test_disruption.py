"""Tests of ``scheduling.disruption``: what keeps drains and autoscalers from a job's pods, and what does not."""

from typing import Any

from support.builders import DIGITS, Json, rendered, seen


def objects(**scheduling: Any) -> tuple[list[Json], Json]:
    """Return the PodDisruptionBudgets of a job, and the metadata of its pods."""
    made = rendered(seen({**DIGITS, "scheduling": scheduling}))
    [pods] = (item for item in made if item["kind"] == "StatefulSet")
    metadata = pods["spec"]["template"]["metadata"]
    return [item for item in made if item["kind"] == "PodDisruptionBudget"], metadata


def test_job_that_avoids_disruption_has_a_budget_that_selects_its_pods() -> None:
    [budget], metadata = objects(disruption="Avoid")
    assert budget["spec"]["maxUnavailable"] == 0
    assert budget["spec"]["selector"]["matchLabels"].items() <= metadata["labels"].items()
    assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"


def test_budget_that_is_left_selects_no_pod_of_a_job_that_allows_disruption() -> None:
    [left], _ = objects(disruption="Avoid")
    budgets, metadata = objects()
    assert budgets == [] and "karpenter.sh/do-not-disrupt" not in metadata["annotations"]
    assert not left["spec"]["selector"]["matchLabels"].items() <= metadata["labels"].items()
