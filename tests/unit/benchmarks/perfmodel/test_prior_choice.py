"""Tests of the choice of the prior by cross-validation over data sets, with invented scores."""

import pytest
from benchmarks.perfmodel.tasks.few_measurements import Score
from benchmarks.perfmodel.tasks.prior_choice import CHOICES, Choice, change, growth, held_out

BEFORE, WIDE = (0.05, 1.0), (0.1, 1.5)


def scores(**errors: float) -> list[Score]:
    return [Score("a cluster", name, 3, error, 10.0, 90.0, 50.0, (0.0,)) for name, error in errors.items()]


def test_change_is_relative_and_each_data_set_counts_the_same() -> None:
    assert change(scores(a=2.0, b=50.0), scores(a=1.0, b=100.0)) == pytest.approx(0.0)
    assert change(scores(a=2.0), scores(a=1.0)) == pytest.approx(100.0)


def test_values_are_scored_on_the_data_set_that_did_not_choose_them() -> None:
    found = {BEFORE: scores(a=10.0, b=10.0, c=10.0), WIDE: scores(a=40.0, b=9.0, c=9.0)}
    lines = held_out(Choice(BEFORE, (BEFORE, WIDE), growth), found, lambda s: s.name)
    assert "(0.1, 1.5): chosen 1 times of 3" in "\n".join(lines)
    assert "+58.7 %" in "\n".join(lines)


def test_grids_contain_the_values_to_compare_with() -> None:
    assert all(choice.before in choice.grid for choice in CHOICES.values())
