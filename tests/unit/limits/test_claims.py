"""Tests of the checkpoint claim of a job under the quotas of its namespace."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.job.observed import ClaimSeen, ClassSeen
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import decide, question
from dljob.scheduling import NamespaceLimits, Quota
from support.builders import CONFIG, DIGITS, nodes, seen

Json = dict[str, Any]
ELASTIC: Json = {**DIGITS, "globalBatchSize": 1920, "nodes": {"min": 1, "max": 8}}
MANY = nodes({"name": "n", "count": 8, "cpu": 4, "memory": "8Gi"})
CLAIMS = "persistentvolumeclaims"


def test_existing_claim_is_part_of_the_question() -> None:
    """Fixed bug: each new plan, as after a suspension, needed quota for one more claim than the job has."""
    limits = NamespaceLimits((Quota("team", {CLAIMS: 1000}, {CLAIMS: 1000}),))
    claims = {name: ClaimSeen(name, "Bound", ("ReadWriteMany",)) for name in ("digits-checkpoints", "another")}
    asked = question(parse_observed(seen(ELASTIC, claims=claims)))
    asked = replace(asked, observed=replace(asked.observed, view=MANY, limits=limits))
    found = decide(asked, CONFIG)
    assert isinstance(found, StoredPlan), found
    pending = {name: replace(claim, phase="Pending") for name, claim in claims.items()}
    assert question(parse_observed(seen(ELASTIC, claims=pending))) == question(
        parse_observed(seen(ELASTIC, claims=claims))
    )


@pytest.mark.parametrize(
    ("classes", "counts"),
    [
        ((ClassSeen("fast", default=True), ClassSeen("slow")), True),
        ((ClassSeen("slow", default=True), ClassSeen("fast")), False),
        ((ClassSeen("fast", default=True), ClassSeen("slow", default=True)), False),
    ],
)
def test_claim_without_a_class_counts_for_the_default_one(classes: tuple[ClassSeen, ...], counts: bool) -> None:
    """Fixed bug: the API server rejected the claim, although the job waited for no quota."""
    limits = NamespaceLimits((Quota("team", {f"fast.storageclass.storage.k8s.io/{CLAIMS}": 0}),))
    asked = question(parse_observed(seen(ELASTIC, classes=classes)))
    found = decide(replace(asked, observed=replace(asked.observed, view=MANY, limits=limits)), CONFIG)
    assert isinstance(found, Infeasible) == counts
    named = {**ELASTIC, "checkpoint": {"volume": {"storageClassName": "slow"}}}
    observed = seen(named, MANY, classes=classes, limits=limits)
    assert isinstance(decide(parse_observed(observed), CONFIG), StoredPlan)
