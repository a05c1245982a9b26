"""Tests of the table of goals: what misses its goal is named, and figures without a goal never do."""

import math

import pytest
from benchmarks.lib.goals import Figure, table


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("p99", 2.9, "s", high=3.0), "ok"),
        (Figure("p99", 3.1, "s", high=3.0), "MISSED"),
        (Figure("p99", math.nan, "s", high=3.0), "MISSED"),
        (Figure("reaction", math.inf, "s", high=1.0), "MISSED"),
        (Figure("rate", 50.0, low=50.0), "ok"),
        (Figure("rate", 49.0, low=50.0), "MISSED"),
        (Figure("writes", 0, high=0), "ok"),
        (Figure("CPU per job", 106.0, "ms"), ""),
    ],
)
def test_verdict(figure: Figure, verdict: str) -> None:
    assert figure.row()[3] == verdict and figure.missed == (verdict == "MISSED")


def test_table_has_aligned_columns() -> None:
    text = table([Figure("p99", 3.14159, "s", high=3.0), Figure("memory of the operator", 120.0, "MiB")])
    assert text.splitlines() == [
        "figure                  goal   measured",
        "p99                     ≤ 3 s  3.142 s   MISSED",
        "memory of the operator         120 MiB",
    ]
