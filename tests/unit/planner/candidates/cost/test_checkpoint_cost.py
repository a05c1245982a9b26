"""Tests of the training time that checkpoints cost, also without interruptions of nodes."""

from dataclasses import replace
from typing import Any

import pytest

from dlcontract.checkpoint.interval import BETWEEN_POD_FAULTS_S, FIRST_S, best_interval_s
from dljob.planner import Request
from dljob.planner.candidates.cost.interrupted import checkpoint_s
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.types import Prediction
from support.planner_questions import decided, view

LARGE = Request(
    job="j", global_batch=64, total_steps=1000, profile="own", parameters=10**9, flops_per_sample=1e9,
    activation_nbytes_per_sample=10**5, optimizer="AdamW", checkpoint_interval_s=600.0,
)  # fmt: skip
"""A model whose parameters and state of AdamW have 12 GB: a checkpoint takes a minute."""
COST_S = 12e9 / 2e8


NODE = view({"count": 1, "cpu": 8, "memory": "128Gi"})


def predicted(request: Request) -> Prediction:
    return decided(request, NODE).chosen.prediction


NEVER = predicted(replace(LARGE, checkpoints=False))


@pytest.mark.parametrize(
    ("changes", "cost_s", "every_s"),
    [
        ({}, COST_S, 600.0),
        ({"checkpoint_interval_s": 60.0}, COST_S, 60.0),
        ({"checkpoint_interval_s": 30.0}, COST_S, COST_S),  # none begins while another is being written
        ({"checkpoints_in_store": True}, 2 * COST_S, 600.0),
        ({"checkpoint_interval_s": 1e9}, COST_S, None),  # one at the end
        ({"checkpoints": False}, 0.0, None),
        ({"reduced_by_script": True, "collective": "Torch"}, 0.0, None),  # the script writes them
    ],
    ids=["fixed", "often", "too often", "store", "rarely", "none", "torchrun"],
)
def test_each_checkpoint_costs_training_time(changes: dict[str, Any], cost_s: float, every_s: float | None) -> None:
    found = predicted(replace(LARGE, **changes))
    calm_s = found.total_s - found.checkpoints_s
    assert calm_s == pytest.approx(NEVER.total_s) and NEVER.checkpoints_s == 0.0
    assert found.checkpoints_s == pytest.approx(cost_s * (calm_s / every_s if every_s else 1))
    assert found.interruption_s == 0.0


def test_interval_that_the_trainer_chooses() -> None:
    """The first checkpoint comes after a minute, and shows its cost."""
    found = predicted(replace(LARGE, checkpoint_interval_s=None))
    assert checkpoint_s(workload_of(LARGE)) == COST_S
    interval_s = best_interval_s(COST_S, BETWEEN_POD_FAULTS_S)
    assert found.checkpoints_s == pytest.approx(COST_S * (1 + max(1.0, (NEVER.total_s - FIRST_S) / interval_s)))


def test_checkpoints_count_for_deadlines_energy_and_cost() -> None:
    found = predicted(replace(LARGE, checkpoint_interval_s=60.0))
    longer = found.total_s / NEVER.total_s
    assert longer == pytest.approx(2.0) and found.step_s == NEVER.step_s
    for name in ("total_p90_s", "energy_J", "cost_usd"):
        assert getattr(found, name) == pytest.approx(longer * getattr(NEVER, name)), name
    late = decided(replace(LARGE, checkpoint_interval_s=60.0, deadline_s=1.5 * NEVER.total_p90_s), NODE)
    assert late.warning is not None and "no plan meets the deadline" in late.warning
    assert "of which checkpoints take " in late.warning
