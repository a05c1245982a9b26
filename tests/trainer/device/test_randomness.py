"""Tests of seeding a step."""

import traceback

import pytest
import torch

from dltrain.device.randomness import seed


def test_seed_matches_torch_without_formatting_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("a stack was formatted"))
    seed(7, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
