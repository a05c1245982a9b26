"""Tests of plans with a sharded dataset: what they need, and what they exclude."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from dlcontract import Plan
from support.builders import plan_of
from support.job_lifecycle import training

BASE = json.loads(plan_of(training()).plan.to_json())
SHARDED = {"path": "/d/a.npz", "distribution": "Sharded", "uri": "s3://a/a.npz"}


def test_shards_are_for_the_ranks_of_dltrain() -> None:
    plan = Plan.model_validate({**BASE, "dataset": SHARDED})
    assert plan.dataset.sharded and Plan.parse(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": {**SHARDED, "uri": None}}, "distribution Sharded with uri None"),
        ({"model": {"command": ["a"], "framework": "Torchrun"}}, "dataset.distribution: found Sharded"),
    ],
)
def test_plan_that_no_rank_can_train_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Plan.model_validate({**BASE, "dataset": SHARDED, **changes})
