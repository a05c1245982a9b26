"""Tests that the observer leaves operators alone that call functions of the script."""

from pathlib import Path

import pytest

from support.trainer.observed_scripts import loop, observed, python


@pytest.mark.long
def test_script_may_use_operators_of_higher_order(tmp_path: Path) -> None:
    model = """
class Model(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return torch.cond(h.sum() > 0, lambda v: v * 2, lambda v: v * 3, (h,)) if step >= 2 else h
model = Model(20, 2)
"""
    _, ended = observed(tmp_path, loop(model=model))
    assert ended.stdout == python(loop(model=model), None).stdout
