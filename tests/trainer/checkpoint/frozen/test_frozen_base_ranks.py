"""Tests of ``t.wrap(…, save="trained")`` with real ranks that are killed, gathered, or lost."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dltrain.checkpoint.sharded.export import export
from dltrain.checkpoint.store import MODEL, STATE
from support.trainer.bodies.training.frozen_base import FROZEN, STEPS, STORED, newest
from support.trainer.ranks import BODIES, command, run, run_ranks

BODY = BODIES / "training/frozen_base.py"


def model_hash(output: str) -> str:
    """Return the hash of the whole model that rank 0 has printed."""
    (found,) = re.findall(r"model ([0-9a-f]{64}) of \d+ tensors", output)
    return str(found)


def check_files(folder: Path, stored: set[str]) -> None:
    """Check that a checkpoint has the tensors ``stored`` of the model, and the digests of the frozen parameters."""
    assert load_file(folder / MODEL).keys() == stored
    assert json.loads((folder / STATE).read_text())["frozen"].keys() == set(FROZEN)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("strategy", ["Data", "Sharded", pytest.param("Optimizer", marks=pytest.mark.long), "Pipeline"])
def test_killed_training_ends_with_the_same_bits(strategy: str, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert run(command(2, BODY, "2", killed, strategy, "kill"), 120).code != 0
    again = run_ranks(2, BODY, "2", killed, strategy).output
    found = re.search(r"resumed from step (\d+) in", again)
    assert found is not None and 0 < int(found[1]) <= 5, again
    assert model_hash(again) == model_hash(run_ranks(2, BODY, "2", whole, strategy).output), again
    stored = STORED - {"5.seen"} if strategy == "Pipeline" else STORED
    for folder in (killed, whole):
        check_files(newest(folder), stored)
    if strategy == "Sharded":
        export(newest(whole), tmp_path / MODEL)
        assert (tmp_path / MODEL).read_bytes() == (newest(whole) / MODEL).read_bytes()


@pytest.mark.mpi(2)
def test_gathered_checkpoint_of_sharded_ranks_has_no_frozen_parameters(tmp_path: Path) -> None:
    """Rank 0 gathers the state if ranks do not share the volume. Strategy Data resumes from it."""
    run_ranks(2, BODY, "2", tmp_path, "Sharded", "separate")
    check_files(newest(tmp_path / "0"), STORED)
    again = run_ranks(2, BODY, "2", tmp_path / "0", "Data", "longer").output
    assert f"resumed from step {STEPS} in" in again


@pytest.mark.mpi
def test_ranks_that_continue_after_the_loss_of_rank_0_save_and_resume(tmp_path: Path) -> None:
    ended = run(command(3, BODY, "3", tmp_path, "Data", "first", "elastic", ulfm=True))
    assert "ranks (1, 2) continue from step 5" in ended.output and f"after {STEPS} steps" in ended.output, ended.output
    check_files(newest(tmp_path), STORED)
    again = run_ranks(3, BODY, "3", tmp_path, "Data", "longer").output
    assert f"resumed from step {STEPS} in" in again and f"after {2 * STEPS} steps" in again, again
