"""Tests of the collective DDP: PyTorch's DistributedDataParallel reduces gradients of local batches of any size.

Ranks use gloo. No test uses a GPU.
"""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from support.trainer.plans import make_plan
from support.trainer.ranks import BODIES, run_ranks


@pytest.mark.mpi(2)
def test_buckets_other_functions_of_the_model_and_misuse() -> None:
    """A network with a frozen layer, BatchNorm, parameters of two dtypes, and parameters without a part in the loss."""
    ended = run_ranks(2, BODIES / "parallel/ddp.py", "2", timeout_s=120)
    assert ended.output.count("off by") == 2, ended.output
    assert "a rank without a backward pass takes part" in ended.output
    assert "buckets and misuse are as expected" in ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_clipping_accumulation_and_unused_or_frozen_layers_equal_one_process(ranks: int) -> None:
    ended = run_ranks(ranks, BODIES / "parallel/own_loop.py", str(ranks), "DDP", timeout_s=120)
    assert ended.output.count("off by") == 6, ended.output


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_shares_equal_one_process(ranks: int) -> None:
    """The loss is a mean over samples or tokens. Hypothesis chooses the shares."""
    ended = run_ranks(ranks, BODIES / "parallel/any_shares.py", str(ranks), "DDP", timeout_s=120)
    assert re.search(r"\d+ examples, off by at most", ended.output), ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_steps_in_micro_batches_equal_whole_batches_in_one_process(ranks: int) -> None:
    """Micro-batches of unequal sizes, losses over tokens, clipping, schedules, and the gradient noise scale."""
    ended = run_ranks(ranks, BODIES / "parallel/accumulation.py", str(ranks), "DDP", timeout_s=200)
    assert ended.output.count("the same as in one process") == 7, ended.output


@pytest.mark.mpi(3)
@pytest.mark.long
def test_batch_norm_over_all_ranks_equals_one_process() -> None:
    ended = run_ranks(3, BODIES / "parallel/batch_norm.py", "3", "DDP", timeout_s=120)
    assert "5 examples, off by at most" in ended.output, ended.output


@pytest.mark.mpi(3)
@pytest.mark.long
def test_user_training_loops_equal_one_process_or_are_rejected() -> None:
    """Sparse embeddings, unfreezing, contrastive losses, gradients that the script assigns, and others."""
    ended = run_ranks(3, BODIES / "parallel/user_loops.py", "3", "DDP", timeout_s=120)
    assert ended.output.count("off by") == 8, ended.output


@pytest.mark.mpi(3)
@pytest.mark.long
def test_grad_scaler_skips_the_same_updates_as_in_one_process() -> None:
    ended = run_ranks(3, BODIES / "parallel/precision/grad_scaler.py", "3", "DDP", timeout_s=120)
    assert ended.output.count("updates skipped") == 8, ended.output


@pytest.mark.mpi(3)
@pytest.mark.long
def test_unused_parameters_hold_up_no_reduction() -> None:
    body, cases = BODIES / "parallel/unused_parameters.py", ("branches", "accumulated")
    ended = run_ranks(3, body, "3", "DDP", *cases, timeout_s=120)
    for name in cases:
        found = re.search(rf"{name}: off by \S+, (\d+) of (\d+) reductions during backward", ended.output)
        assert found is not None and int(found[1]) > 0.9 * int(found[2]), ended.output


@pytest.mark.parametrize("parallelism", ["Optimizer", "Pipeline", "Tensor"])
def test_plan_rejects_another_strategy(parallelism: str) -> None:
    fields = {"shares": [60, 60], "global_batch": 120 if parallelism == "Optimizer" else 60, "min_ranks": 2}
    with pytest.raises(ValidationError, match="found DDP with parallelism"):
        make_plan(2, collective="DDP", parallelism=parallelism, **fields)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("collective", "strategy"), [("DDP", "Data"), ("Auto", "Sharded")])
def test_script_may_end_the_process_group_itself(collective: str, strategy: str, tmp_path: Path) -> None:
    """Fixed bug: dltrain ended the group once more, and the job failed after its last step."""
    body = BODIES / "scripts/destroyed_group.py"
    ended = run_ranks(2, body, str(tmp_path), collective, strategy, timeout_s=120)
    assert "Exception" not in ended.output and "Traceback" not in ended.output, ended.output
    assert [path.name for path in tmp_path.glob("*/step-*")] == ["step-0000000008"], ended.output
