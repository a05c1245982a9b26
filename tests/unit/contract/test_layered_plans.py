"""Tests of plans with the collective LayeredServer, whose rank 0 is the server."""

from typing import Any

import pytest

from dlcontract import ModelRef, OptimizerRef, Plan
from support.trainer.plans import make_plan


def test_rank_0_serves() -> None:
    plan = make_plan(3, shares=[0, 80, 40], collective="LayeredServer")
    assert Plan.model_validate_json(plan.to_json()) == plan
    assert make_plan(1, shares=[120], collective="LayeredServer").ranks[0].share == 120, "one rank needs no server"


@pytest.mark.parametrize(
    ("shares", "changes", "reason"),
    [
        ([80, 40, 0], {}, "LayeredServer with rank 0 as the server"),
        ([80, 40], {}, "found no parameter server"),
        ([0, 120, 0], {}, "rank 0 as the only server"),
        ([0, 120], {"parallelism": "Optimizer"}, "rank 0 as the only server"),
        ([0, 120], {"synchronization": "Asynchronous"}, "rank 0 as the only server"),
        ([0, 120], {"model": ModelRef(command=("a",))}, "no command"),
        ([0, 120], {"optimizer": OptimizerRef(find_rate=True)}, "find_rate False"),
        ([0, 120], {"optimizer": OptimizerRef(scaling="AdaScale", base_batch=8)}, "no AdaScale"),
        ([0, 120], {"collective": "ParameterServer"}, "ParameterServer with a worker as rank 0"),
        ([0, 120], {"collective": "Ring"}, "found parameter servers"),
    ],
)
def test_other_plans_are_rejected(shares: list[int], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_plan(len(shares), shares=shares, **{"collective": "LayeredServer"} | changes)
