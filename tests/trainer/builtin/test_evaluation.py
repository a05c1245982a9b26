"""Tests of the built-in trainer's evaluation: its batches need no more memory than those of the training."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dlcontract import ModelRef
from dljob.planner.candidates.cost import evaluations as predicted
from dltrain.builtin import evaluation
from dltrain.builtin import rank as builtin_rank
from dltrain.data.datasets import load_by_name
from support.trainer.plans import make_plan

ALL = 360
"""Held-out samples of the dataset digits."""
SPLIT: dict[str, Any] = {"global_batch": 48, "shares": [24] * 4, "replicas": 2, "min_ranks": 4}


def test_plans_predict_batches_of_this_size() -> None:
    assert evaluation.MAX_BATCH == predicted.MAX_BATCH


@pytest.mark.parametrize(
    ("rank", "largest", "samples", "plan"),
    [
        (0, 8, ALL, {"shares": [8]}),
        (0, 256, ALL, {"shares": [600]}),
        (1, 10, 120, {"shares": [20, 10]}),
        (1, 4, 180, {"shares": [16, 16], "micro_batches": 4}),
        (2, 5, 180, SPLIT | {"parallelism": "Pipeline", "micro_batches": 5, "model": ModelRef(name="digits-cnn")}),
        (0, 24, 180, SPLIT | {"parallelism": "Tensor"}),
    ],
    ids=["small", "large", "uneven", "accumulating", "pipeline", "tensor"],
)
@pytest.mark.parametrize("complete", [False, True])
def test_batches_of_an_evaluation_are_at_most_those_of_the_training(
    rank: int, largest: int, samples: int, plan: dict[str, Any], complete: bool
) -> None:
    """Each of the rank's samples is evaluated once."""
    made = make_plan(len(plan["shares"]), **{"global_batch": sum(plan["shares"])} | plan)
    sizes: list[int] = []

    def predict(_: nn.Module, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return torch.zeros(len(x), 10)

    trainer: Any = SimpleNamespace(
        plan=made, shares=tuple(each.share for each in made.ranks), rank=rank, device=torch.device("cpu"),
        complete=complete, parallel=SimpleNamespace(predict=predict), autocast=nullcontext, sum=lambda values: values,
        collect=lambda data: [data], analyzed=lambda analysis: None,
    )  # fmt: skip
    accuracy = builtin_rank.evaluate(trainer, nn.Identity(), load_by_name("digits"))
    assert (max(sizes), sum(sizes)) == (largest, samples)
    assert 0 < accuracy < 0.3


def test_a_parameter_server_evaluates_in_batches_of_its_workers() -> None:
    """It evaluates all samples after each epoch of asynchronous training, and has no batches of its own."""
    made = make_plan(3, shares=[0, 12, 8], global_batch=20, collective="LayeredServer")
    shares = [each.share for each in made.ranks]
    assert [builtin_rank.largest_batch(made, shares, rank) for rank in range(3)] == [8, 12, 8]
    chosen, sizes = np.arange(30), list[int]()

    def predict(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return torch.zeros(len(x), 10)

    builtin_rank.count_correct(predict, load_by_name("digits"), chosen, torch.device("cpu"), 8)
    assert sizes == [8, 8, 8, 6]
