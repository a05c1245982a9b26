"""Tests of when ranks copy the training state to the memory of their pods."""

from pathlib import Path
from typing import Any

import pytest

from dltrain.builtin import rank
from dltrain.checkpoint import memory_copy
from dltrain.checkpoint.writer import CheckpointManager
from dltrain.elastic.team import Team
from dltrain.protocol import rank_messages
from dltrain.protocol.rank_messages import EXIT_OK
from support.trainer.plans import make_plan, saving, write

STEPS = 30


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a copy be due after each step. Record comparisons of parameters, and requests to copy."""
    calls: list[str] = []
    save, compare = CheckpointManager.save, Team.agree_on_parameters

    def saved(self: CheckpointManager, *arguments: Any, durable: bool = True, **options: Any) -> None:
        if not durable:
            calls.append("copy")
        save(self, *arguments, durable=durable, **options)

    def compared(self: Team, step: int) -> bool:
        if step < STEPS:
            calls.append("compare")
        return compare(self, step)

    monkeypatch.setattr(CheckpointManager, "save", saved)
    monkeypatch.setattr(Team, "agree_on_parameters", compared)
    monkeypatch.setattr(memory_copy, "INTERVAL_S", 0.0)
    monkeypatch.setattr(memory_copy, "STALL_PART", 1e9)
    plan = make_plan(1, steps=STEPS, checkpoint=saving(tmp_path / "volume"))
    monkeypatch.setenv(rank_messages.PLAN_ENV, write(plan, tmp_path))
    monkeypatch.setenv(rank_messages.MEMORY_ENV, str(tmp_path / "memory"))
    return calls


def test_state_that_fits_nowhere_is_neither_compared_nor_gathered_again(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_copy, "room_for", lambda *_: False)
    assert rank.main() == EXIT_OK
    assert copies == ["compare", "copy"] * 2, "ranks learn of the failure with the gradients of the next step"


def test_nothing_is_copied_without_a_place_for_copies(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rank_messages.MEMORY_ENV)
    assert rank.main() == EXIT_OK
    assert copies == []


def test_state_that_fits_is_copied_again(copies: list[str]) -> None:
    assert rank.main() == EXIT_OK
    assert copies.count("copy") > 5


def test_time_of_comparing_and_gathering_counts_towards_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dltrain.checkpoint.memory_copy.time.monotonic", lambda: now[0])
    manager = CheckpointManager.__new__(CheckpointManager)
    manager._pace, manager._writer, manager._memory = memory_copy.Pace(), None, None
    manager.save(1, {}, {}, {}, durable=False, gathered_s=2.0)
    for after_s, due in ((2.0 / memory_copy.STALL_PART - 1, False), (2.0 / memory_copy.STALL_PART, True)):
        now[0] = 100.0 + after_s
        assert manager._pace.due is due
