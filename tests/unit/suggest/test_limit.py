"""A limit of time cuts epochs first, then the model, and never plans more than the time that is left."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.suggest.recommendation.limit import MARGIN, MIN_EPOCHS, START_S, fitted, race_s, total_s, with_race
from dljob.suggest.recommendation.model import Candidate, Settings, evaluation
from dljob.suggest.recommendation.prediction import Prediction

LARGE = Settings("large", "", 1000, 6000, 10, "loss", 32, (16, 64), 30, 0.1)
SMALL = replace(LARGE, name="small", flops_per_sample=600)


def predict(settings: Settings) -> Prediction:
    """Predict a time in proportion to epochs and operations, after a second for the start."""
    return Prediction("1 x cpu", 1 + settings.epochs * settings.flops_per_sample / 600, 10**9, None, None)


def test_a_large_test_part_takes_time_of_the_limit() -> None:
    """Fixed bug: a test part of a multiple of the training part was predicted to take as long as a quarter of it."""
    large = (replace(LARGE, evaluation=evaluation(1000, 100)), predict(LARGE))
    assert total_s(large, 1, 1.0) - total_s((LARGE, predict(LARGE)), 1, 1.0) == pytest.approx(5.85 * 301 / 30)


def test_enough_time_changes_nothing() -> None:
    assert [s for s, _ in fitted([LARGE, SMALL], predict, 3600, 1, 1.0)] == [LARGE, SMALL]


def test_epochs_are_cut_before_the_model() -> None:
    chosen, found = fitted([LARGE, SMALL], predict, 200, 1, 1.0)[0]
    assert chosen.name == "large"
    assert MIN_EPOCHS * LARGE.epochs <= chosen.epochs < LARGE.epochs
    assert found == predict(chosen)


def test_smaller_model_is_chosen_if_few_epochs_fit() -> None:
    assert fitted([LARGE, SMALL], predict, 60, 1, 1.0)[0][0].name == "small"


def test_slow_machine_counts() -> None:
    assert fitted([LARGE, SMALL], predict, 200, 1, 5.0)[0][0].name == "small"


def test_model_without_a_plan_is_never_chosen() -> None:
    def refuse(settings: Settings) -> Prediction:
        return Prediction(problem="too large") if settings.name == "large" else predict(settings)

    assert fitted([LARGE, SMALL], refuse, 3600, 1, 1.0)[0][0].name == "small"


@given(left_s=st.floats(1, 1e5), reading_s=st.floats(0, 100), pace=st.floats(0.1, 100))
def test_plan_fits_or_is_one_epoch_of_the_fastest(left_s: float, reading_s: float, pace: float) -> None:
    rows = fitted([LARGE, SMALL], predict, left_s, reading_s, pace)
    assert {s.name for s, _ in rows} == {"large", "small"}
    assert all(s.epochs >= 1 for s, _ in rows)
    chosen = rows[0]
    assert total_s(chosen, reading_s, pace) <= left_s or (chosen[0].name, chosen[0].epochs) == ("small", 1)
    assert total_s(chosen, reading_s, pace) >= START_S


@pytest.mark.parametrize(("left_s", "epochs"), [(20, 1), (15, 1)])
def test_too_little_time_leaves_one_epoch(left_s: float, epochs: int) -> None:
    slow = replace(SMALL, flops_per_sample=60_000)
    assert fitted([replace(LARGE, flops_per_sample=600_000), slow], predict, left_s, 1, 1.0)[0][0].epochs == epochs


RACING = replace(LARGE, rivals=(Candidate(0.1, 0.0, 0.0),) * 3)


@given(left_s=st.floats(1, 1e5), reading_s=st.floats(0, 100), pace=st.floats(0.1, 100))
def test_a_race_fits_beside_the_whole_training(left_s: float, reading_s: float, pace: float) -> None:
    chosen = fitted([RACING], predict, left_s, reading_s, pace)[0]
    settings, line = with_race(chosen, [RACING], left_s, reading_s, pace)
    assert settings.race != line.startswith("none")
    if settings.race:
        assert settings.epochs == RACING.epochs
        assert total_s(chosen, reading_s, pace) + race_s(chosen, pace) <= MARGIN * left_s


@pytest.mark.parametrize(
    ("settings", "left_s", "expected"),
    [
        (RACING, 3600.0, "4 settings"),
        (LARGE, 3600.0, "other settings"),
        (replace(RACING, parameters=10**7), 3600.0, "memory"),
        (RACING, 400.0, "no time"),
        (RACING, 200.0, "the limit cuts the epochs"),
    ],
)
def test_a_race_or_the_reason_for_none_is_in_a_line(settings: Settings, left_s: float, expected: str) -> None:
    chosen = fitted([settings], predict, left_s, 1, 1.0)[0]
    assert expected in with_race(chosen, [settings], left_s, 1, 1.0)[1]
