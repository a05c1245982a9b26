"""Tests of the figures of predictions: errors, intervals from median and p90, and binomial intervals."""

from math import exp
from typing import Any

import pytest
from benchmarks.lib.binomial import wilson
from benchmarks.predictions.figures import coverage, error, figures, half_width, inside, repeat_noise


def run(ratio: float, *, p90: float = 1.2, number: int = 1, name: str = "mlp", rounds: int = 1) -> dict[str, Any]:
    """Return a run of 100 steps whose predicted step is ``ratio`` times the measured one."""
    predicted = {"stepSeconds": 0.1, "stepSecondsP90": 0.1 * p90, "totalSeconds": 10.0}
    measured = {"measured_s": 0.1 / ratio, "total_s": 10.0 / ratio}
    about = {"name": name, "run": number, "round": rounds, "configuration": {"model": name}}
    return {**about, "predicted": predicted, **measured}


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(9, 10, 0.596, 0.982), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-3)


def test_the_interval_has_the_5th_and_the_95th_percentile() -> None:
    assert exp(half_width(run(1.0, p90=1.2))) == pytest.approx(1.2 ** (1.6449 / 1.2816), rel=1e-4)
    assert inside(run(1.25)) and inside(run(1 / 1.25)) and not inside(run(1.3)) and not inside(run(1 / 1.3))


def test_errors_and_coverage_count_each_run_and_each_configuration() -> None:
    runs = [run(1.0), run(1.1, name="lenet"), run(2.0), run(0.5, name="lenet")]
    part, text = coverage(runs)
    assert error(runs) == pytest.approx(30.0) and part == 50.0
    assert text == "15–85 % by 4 runs, 9–91 % by 2 configurations"


def test_figures_separate_first_and_second_runs() -> None:
    found = {each.name: each for each in figures([run(1.1), run(1.02, number=2)], ["lenet: failed"])}
    first, second = (found[f"{words} runs: median error of a step"] for words in ("first", "second"))
    assert first.measured == pytest.approx(10.0) and second.measured == pytest.approx(2.0)
    assert not first.missed and not second.missed and found["runs that failed"].missed


def test_repeat_noise_compares_the_runs_of_a_pair() -> None:
    pairs = [run(1.0), run(1.1, number=2), run(1.0, rounds=2), run(1.2, number=2, rounds=2), run(1.0, rounds=3)]
    assert repeat_noise(pairs) == pytest.approx(15.0)


def test_goals_are_missed_without_runs() -> None:
    assert sum(each.missed for each in figures([], [])) == 6
