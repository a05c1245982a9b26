"""Tests of the trade-offs of a plan: no shown plan is dominated, and omitted plans are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.planner import Choice, Prediction
from dljob.planner.search.pareto import MAX_SHOWN, front, promising
from dljob.planner.search.screen import Screened
from support.planner_questions import RESNET, decided, view

figures = st.tuples(*[st.floats(0.1, 10)] * 3)


def choice(name: str, time_s: float, energy_J: float | None, usd: float | None) -> Choice:
    prediction = Prediction(
        step_s=time_s, step_p90_s=time_s, samples_per_s=1.0, total_s=time_s, energy_J=energy_J, cost_usd=usd,
        compute_s=time_s, communication_s=0.0, memory_nbytes=1, bottleneck="", basis="catalogue",
    )  # fmt: skip
    return Choice(name, (), "Ring", prediction)


def dominates(a: tuple[float, ...], b: tuple[float, ...], tolerance: float) -> bool:
    return all(x <= y * (1 + tolerance) for x, y in zip(a, b, strict=True))


@given(st.lists(figures, min_size=1, max_size=30), st.data(), st.sampled_from([0.0, 0.02, 0.5]))
def test_shown_plans_are_not_dominated_and_omitted_plans_are(
    rows: list[tuple[float, float, float]], data: st.DataObject, tolerance: float
) -> None:
    choices = [choice(str(i), *row) for i, row in enumerate(rows)]
    chosen = data.draw(st.sampled_from(choices))
    shown = front(chosen, choices, tolerance)
    indices = [int(c.summary) for c in shown]
    assert chosen in shown and len(set(indices)) == len(indices) <= MAX_SHOWN
    assert indices == sorted(indices, key=lambda i: rows[i])
    for i in indices:
        assert chosen is choices[i] or not any(
            dominates(rows[j], rows[i], tolerance) for j in indices if rows[j] < rows[i]
        )
    if len(indices) < MAX_SHOWN:
        assert all(any(dominates(rows[j], row, tolerance) for j in indices) for row in rows)


def test_criterion_missing_in_some_plans_is_ignored() -> None:
    fast, slow = choice("fast", 1.0, None, 2.0), choice("slow", 2.0, 1.0, 3.0)
    assert front(fast, [fast, slow], 0.0) == (fast,)
    assert (
        front(fast, [fast, replace(slow, prediction=replace(slow.prediction, cost_usd=1.0))], 0.0)[1].summary == "slow"
    )


@given(st.lists(figures, min_size=1, max_size=40), st.integers(2, 8))
def test_promising_rows_range_from_the_fastest_to_the_most_frugal(
    rows: list[tuple[float, float, float]], limit: int
) -> None:
    time_s, energy_J, usd = np.array(rows).T
    infeasible = np.append(time_s, np.inf), np.append(energy_J, 0.0), np.append(usd, 0.0)
    found = promising(
        Screened(
            infeasible[0], infeasible[0], infeasible[1], infeasible[2], infeasible[1], np.zeros(len(rows) + 1, np.int64)
        ),
        limit,
    )
    assert 1 <= len(found) <= limit and len(rows) not in found
    assert time_s[found[0]] == time_s.min() and (energy_J[found[-1]] == energy_J.min() or usd[found[-1]] == usd.min())
    assert not any(all(np.array(row) < rows[i]) for i in found for row in rows)


@pytest.mark.parametrize("minimize", ["Time", "Energy", "Cost"])
def test_trade_offs_include_the_plans_of_other_objectives(minimize: Any) -> None:
    cluster = view({"count": 4, "cpu": 8, "memory": "32Gi"})
    shown = decided(replace(RESNET, minimize=minimize), cluster).trade_offs
    assert len(shown) > 1
    for other in ("Time", "Energy", "Cost"):
        chosen = decided(replace(RESNET, minimize=other), cluster).chosen.prediction
        figure = {"Time": "total_s", "Energy": "energy_J", "Cost": "cost_usd"}[other]
        assert min(getattr(c.prediction, figure) for c in shown) <= getattr(chosen, figure) * 1.03
