"""The figures of the costs of features without a fault, from times that are known."""

import pytest
from benchmarks.training.survival_costs import rotated, rows


def test_ratio_is_that_of_times_in_the_same_round() -> None:
    """Another load doubles all times of the second round."""
    base, one = rows({"loop": {"base": [1.0, 2.0, 1.0], "norm": [1.1, 2.2, 1.2]}})
    assert (base["feature"], base["ratio"], base["step_s"]) == ("base", 1.0, 1.0)
    assert (one["program"], one["feature"], one["step_s"]) == ("loop", "norm", 1.2)
    assert (one["ratio"], one["least"], one["largest"]) == pytest.approx((1.1, 1.1, 1.2))


def test_every_feature_comes_first_in_some_round() -> None:
    assert [rotated(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]
