"""Tests of the benchmark of predictions from few measurements, with invented scores."""

from dataclasses import replace

from benchmarks.perfmodel.tasks.few_measurements import Score, failures, table


def score(count: int, ours: float, simple: float, covered: float, source: str = "a cluster") -> Score:
    return Score(source, "a workload", count, ours, simple, covered, 50.0, (ours - simple,) * 5)


def test_check_accepts_errors_below_the_simple_model_and_usual_coverage() -> None:
    assert failures([score(1, 9.0, 10.0, 60.0), score(3, 9.0, 10.0, 85.0), score(10, 5.0, 5.0, 95.0)]) == []


def test_check_names_the_number_of_measurements_of_each_failure() -> None:
    found = failures([score(1, 10.1, 10.0, 90.0), score(3, 9.0, 10.0, 84.9), score(5, 9.0, 10.0, 95.1)])
    assert [text.split(" ")[0] for text in found] == ["1", "3", "5"]


def test_check_names_a_source_that_is_worse_than_the_simple_model_beyond_noise() -> None:
    worse, better = score(5, 11.0, 10.0, 90.0, "worse"), score(5, 5.0, 10.0, 90.0, "better")
    (text,) = failures([worse, better])
    assert "worse: error 1.0 % above" in text
    noisy = replace(worse, differences=(-4.0, 6.0, -3.0, 5.0, 1.0))
    assert failures([noisy, better]) == []


def test_table_has_a_row_for_each_source_and_number_and_for_all_sources() -> None:
    lines = table([score(1, 9.0, 10.0, 90.0), score(3, 9.0, 10.0, 90.0)]).splitlines()
    assert len(lines) == 1 + 2 + 2
