"""Tests of the step times that the observer reports."""

from pathlib import Path

import pytest

from support.trainer.observed_scripts import MLP, loop, observed


def test_time_of_slow_steps_is_known_before_the_twentieth(tmp_path: Path) -> None:
    """The clock makes every step last 3 s. A large model would need a minute for 20 of them."""
    clock = "import time; real, later = time.monotonic, [0.0]; time.monotonic = lambda: real() + later[0]; "
    found, _ = observed(tmp_path, loop(model=clock + MLP, after="later[0] += 3.0", steps=10))
    early = [each for each in found if each.step_s is not None and each.steps < 10]
    assert early and early[0].step_s == pytest.approx(3, rel=0.1) and early[0].steps <= 8


def test_time_of_a_run_is_that_of_all_its_steps(tmp_path: Path) -> None:
    """Fixed bug: a disturbance in the last 50 steps, which may be 0.1 s, was the step time of the whole run."""
    clock = "import time; real, later = time.monotonic, [0.0]; time.monotonic = lambda: real() + later[0]; "
    found, _ = observed(tmp_path, loop(model=clock + MLP, after="later[0] += 3.0 if step < 150 else 30.0", steps=200))
    assert found[-1].steps == 200 and found[-1].step_s == pytest.approx(3, rel=0.1)
