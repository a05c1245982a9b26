"""Tests of stops whose grace period is too short for a checkpoint, on real ranks."""

import re
from pathlib import Path

import pytest

from support.trainer.ranks import BODIES, run_ranks

pytestmark = pytest.mark.mpi(3)
BODY = BODIES / "training/short_grace.py"


def stops(folder: Path, grace_s: float) -> tuple[set[tuple[int, int]], str]:
    """Return the first and the last step of each rank, without repetitions, and the output."""
    memory = {"DLTRAIN_MEMORY": str(folder / "memory")}
    output = run_ranks(3, BODY, "3", folder / "volume", str(grace_s), timeout_s=60, **memory).output
    found = re.findall(r"rank \d started at (\d+) and stopped at (\d+)", output)
    assert len(found) == 3, output
    return {(int(first), int(last)) for first, last in found}, output


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_ranks_use_the_copy_in_memory_if_one_of_them_is_killed_too_early(tmp_path: Path) -> None:
    steps, output = stops(tmp_path, 30)
    assert steps == {(0, 5)} and "stopping after step 5 without a checkpoint" in output
    assert checkpoints(tmp_path / "volume/digits-0001") == [] and checkpoints(tmp_path / "memory") == [5]
    steps, output = stops(tmp_path, 30)
    assert steps == {(5, 10)}, output


def test_ranks_write_a_checkpoint_that_fits(tmp_path: Path) -> None:
    steps, output = stops(tmp_path, 600)
    assert steps == {(0, 5)} and "without a checkpoint" not in output
    assert checkpoints(tmp_path / "volume/digits-0001") == [5]
