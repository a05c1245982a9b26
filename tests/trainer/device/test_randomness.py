"""Seeding a step."""

import traceback

import pytest
import torch

from dltrain.device.randomness import seed


def test_a_step_is_seeded_as_torch_would_and_writes_down_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("a stack was formatted"))
    seed(7, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
