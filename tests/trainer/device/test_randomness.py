"""Tests of seeding a step."""

import random
import traceback

import numpy as np
import pytest
import torch

from dltrain.device.randomness import CPU, seed, seed_step


def test_seed_matches_torch_without_formatting_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("a stack was formatted"))
    seed(7, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)


def test_numpy_and_python_draw_the_same_numbers_in_a_step_on_all_ranks_and_after_a_restart() -> None:
    """Fixed bug: timm's ``Mixup`` draws from numpy, so that a resumed training differed from an undisturbed one."""

    def drawn(step: int, rank: int) -> tuple[float, ...]:
        seed_step(3, step, rank, CPU)
        return float(torch.rand(())), np.random.rand(), random.random()

    first, restarted, other_rank, next_step = drawn(5, 0), drawn(5, 0), drawn(5, 1), drawn(6, 0)
    assert restarted == first and other_rank[1:] == first[1:] and other_rank[0] != first[0]
    assert all(a != b for a, b in zip(first, next_step, strict=True))
