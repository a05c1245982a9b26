"""Tests of the learning-rate range test."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dltrain.builtin.range_test import HIGH, LOW, STEPS, Curves, accuracy_interval, interval, plot, saved_rate

RATES = [float(rate) for rate in np.geomspace(LOW, HIGH, STEPS)]


def curve(falls_at: float, blows_up_at: float, noise: float = 0.0) -> list[float]:
    """Return 2.3 until ``falls_at``, then 0.5 less for each factor e, and a steep rise at ``blows_up_at``."""
    x, draw = np.log(RATES), np.random.default_rng(0)
    y = 2.3 - 0.5 * np.clip(x - np.log(falls_at), 0, 3.5) + np.exp(4 * (x - np.log(blows_up_at)))
    return [float(value) for value in np.minimum(y, 9) + noise * draw.standard_normal(len(x))]


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("falls_at", [1e-5, 1e-4, 1e-3, 1e-2])
def test_interval_is_where_the_loss_falls(falls_at: float, noise: float) -> None:
    found = interval(RATES, curve(falls_at, 100 * falls_at, noise))
    assert found is not None
    assert falls_at / 2.5 < found.low < 4 * falls_at and 5 * falls_at < found.high < 100 * falls_at
    assert found.rate == pytest.approx((found.low * found.high) ** 0.5)


def accuracies(rises_at: float, falls_at: float, noise: float = 0.0) -> list[float]:
    """Return 0.1 until ``rises_at``, then 0.25 more for each factor e up to 0.95, and a fall to 0.1 at ``falls_at``."""
    x, draw = np.log(RATES), np.random.default_rng(0)
    y = 0.1 + 0.25 * np.clip(x - np.log(rises_at), 0, 3.4) - 0.5 * np.clip(x - np.log(falls_at), 0, 1.7)
    return [float(value) for value in np.clip(y + noise * draw.standard_normal(len(x)), 0, 1)]


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("rises_at", [1e-5, 1e-4, 1e-3, 1e-2])
def test_interval_is_where_the_accuracy_rises(rises_at: float, noise: float) -> None:
    found = accuracy_interval(RATES, accuracies(rises_at, 100 * rises_at, noise))
    assert found is not None
    assert rises_at / 2.5 < found.low < 4 * rises_at and 5 * rises_at < found.high < 100 * rises_at


def test_each_curve_has_its_own_interval() -> None:
    """A loss can fall long before any prediction changes."""
    curves = Curves(RATES, curve(1e-5, 1e-3), accuracies(1e-3, 1e-1))
    by_loss, by_accuracy = curves.interval("Loss"), curves.interval("Accuracy")
    assert by_loss is not None and by_accuracy is not None and by_loss.rate < by_accuracy.rate / 10
    assert accuracy_interval(RATES, [0.1] * STEPS) is None
    root = ElementTree.fromstring(plot(RATES, curves.losses, by_accuracy, curves.accuracies))
    assert len(root.findall("{*}polyline")) == 2


def test_constant_or_rising_loss_gives_no_interval() -> None:
    assert interval(RATES, [2.3] * STEPS) is None
    assert interval(RATES, [2.3 + 0.01 * i for i in range(STEPS)]) is None
    assert interval(RATES[:5], [2.3] * 5) is None
    ElementTree.fromstring(plot(RATES, [2.3] * STEPS, None))


@given(losses=st.lists(st.floats(0, 1e6), max_size=STEPS))
def test_interval_of_any_curve_is_ordered(losses: list[float]) -> None:
    found = interval(RATES[: len(losses)], losses)
    assert found is None or LOW / 1.01 <= found.low <= found.rate <= found.high <= HIGH * 1.01
    ElementTree.fromstring(plot(RATES[: len(losses)], losses, found))


@pytest.mark.parametrize(
    ("content", "rate"),
    [(b'{"rate": 0.25}', 0.25), (b'{"rate": NaN}', None), (b'{"rate": -1}', None), (b'{"rate"', None), (b"", None),
     (b"\xff", None), (b"[]", None)],
)  # fmt: skip
def test_damaged_rate_file_is_ignored(content: bytes, rate: float | None, tmp_path: Path) -> None:
    assert saved_rate((tmp_path / "rate.json").read_bytes) is None
    (tmp_path / "rate.json").write_bytes(content)
    assert saved_rate((tmp_path / "rate.json").read_bytes) == rate
