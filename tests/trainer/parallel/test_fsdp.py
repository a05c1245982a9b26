"""Tests of strategy Sharded: PyTorch's fully_shard with local batches of any size.

Ranks use gloo. No test uses a GPU.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dlcontract import ModelRef
from dltrain.batch.sampling import once_together
from support.trainer.plans import make_plan
from support.trainer.ranks import BODIES, run_ranks

BODY = BODIES / "parallel/fsdp.py"
RANKS = [2, pytest.param(3, marks=pytest.mark.long)]


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", RANKS)
def test_loops_equal_one_process(ranks: int, tmp_path: Path) -> None:
    """Clipping, losses over tokens, frozen layers, evaluation, and layers without gradients on some ranks."""
    ended = run_ranks(ranks, BODY, str(ranks), str(tmp_path), "loops", timeout_s=200)
    assert ended.output.count("off by") == 9, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", RANKS)
def test_batch_norm_over_all_ranks_equals_one_process(ranks: int, tmp_path: Path) -> None:
    """Fixed bug: layers of ``nn.SyncBatchNorm.convert_sync_batchnorm`` ended the script on CPUs."""
    ended = run_ranks(ranks, BODY, str(ranks), str(tmp_path), "batch_norm", timeout_s=200)
    assert ended.output.count("off by") == 2, ended.output


@pytest.mark.mpi(2)
def test_deferred_models_equal_those_in_memory(tmp_path: Path) -> None:
    ended = run_ranks(2, BODIES / "training/deferred.py", "2", str(tmp_path), timeout_s=120)
    assert "deferred: off by" in ended.output and "a rank needed" in ended.output, ended.output


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 2])
def test_micro_batches_and_evaluation_equal_one_process(ranks: int, tmp_path: Path) -> None:
    ended = run_ranks(ranks, BODY, str(ranks), str(tmp_path), "micro_batches", "held_out", "misuse", timeout_s=200)
    assert ended.output.count("off by") == 3, ended.output
    assert "all ranks evaluate equally often" in ended.output and "misuse is rejected" in ended.output


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_checkpoints_are_those_of_strategy_data(ranks: int, tmp_path: Path) -> None:
    ended = run_ranks(ranks, BODY, str(ranks), str(tmp_path), "checkpoints", timeout_s=200)
    assert ended.output.count("checkpoints are those of strategy Data") == 2, ended.output


@pytest.mark.mpi(3)
def test_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(3, BODY, "3", str(tmp_path), "other_ranks", timeout_s=120)
    ended = run_ranks(2, BODY, "2", str(tmp_path), "other_ranks", timeout_s=120)
    assert "resumed on 2 ranks: off by" in ended.output, ended.output


@pytest.mark.parametrize(
    ("samples", "largest", "sizes"),
    [
        (10, [2, 2], [[2, 2, 1], [2, 2, 1]]),
        (7, [1, 5], [[1, 1], [3, 2]]),
        (5, [1, 1], [[2, 1], [1, 1]]),  # batches of one sample would be too many
        (3, [4, 4, 4], [[1], [1], [1]]),
        (2, [0, 3], [[1], [1]]),
    ],
)
def test_all_ranks_have_equally_many_batches(samples: int, largest: list[int], sizes: list[list[int]]) -> None:
    parts = [once_together(samples, largest, rank) for rank in range(len(largest))]
    assert [[len(part.indices) for part in rank] for rank in parts] == sizes
    assert sorted(int(i) for rank in parts for part in rank for i in part.indices) == list(range(samples))


@pytest.mark.parametrize(
    "changes",
    [{"collective": "Ring"}, {"model": ModelRef(name="mlp")}, {"min_ranks": 1}, {"synchronization": "Asynchronous"}],
)
def test_plan_rejects_what_cannot_be_sharded(changes: dict[str, Any]) -> None:
    fields = {"parallelism": "Sharded", "collective": "Torch", "min_ranks": 2}
    with pytest.raises(ValidationError, match="found"):
        make_plan(2, **{**fields, "model": ModelRef(command=("python", "train.py")), **changes})
