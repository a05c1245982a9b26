"""Tests of the search for plans with a parameter server: synchronous, asynchronous and stale-synchronous ones."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.cluster import ClusterView
from dljob.planner import Choice, FixedChoice, Request
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import layouts
from dljob.planner.candidates.options import options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.data_parallel import ordered
from dljob.planner.search.objective import score
from dljob.planner.search.screen import Screen
from support.planner_questions import DIGITS, T4, decided, rejected, view

CPUS = view({"device": "cpu", "count": 5, "cpu": 16}, {"device": "slow", "count": 4, "cpu": 4})
ONE = view({"count": 1, "cpu": 1})
GPUS = view({"device": T4, "count": 4, "devices": 4, "cpu": 16, "memory": "64Gi", "bandwidth": "10G"})
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"synchronization": "Asynchronous"},
    "stale": {"synchronization": "StaleSynchronous", "staleness_bound": 3},
}


def asked(mode: str, **changes: Any) -> Request:
    return replace(DIGITS, global_batch=960, collective="ParameterServer", **MODES[mode], **changes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uneven", [True, False])
@pytest.mark.parametrize("cluster", [CPUS, GPUS])
def test_screening_knows_the_server(mode: str, uneven: bool, cluster: ClusterView) -> None:
    """Regression: the server was screened as a worker, up to ten times as fast as evaluated without a barrier."""
    request = asked(mode, uneven=uneven)
    workload = workload_of(request)
    ways = [
        option
        for pool in eligible(request, cluster).pools
        for layout in layouts(pool, request)[:3]
        for option in options(pool, layout, workload, request, {})
    ]
    screen = Screen(ways, request, workload)
    tried = 0
    for i, one in enumerate(ways):
        for j in range(i, len(ways)):
            if i != j and one.label == ways[j].label:
                continue
            found = screen.screen(screen.types.rows([{i: 2, j: 2}]))
            parts = ordered([Part(ways[option], 2) for option in {i, j}])
            exact = evaluate(parts, "ParameterServer", request, workload)
            assert isinstance(exact, Choice)
            assert found.step_s[0] == pytest.approx(exact.prediction.step_s, rel=0.15), exact.summary
            training = request.total_steps * exact.prediction.step_s / exact.prediction.total_s  # without evaluations
            energy_J = training * (exact.prediction.energy_J or 0.0)
            assert found.energy_J[0] * request.total_steps == pytest.approx(energy_J, rel=0.3)
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("minimize", ["Time", "Energy", "Cost"])
@pytest.mark.parametrize("mode", ["asynchronous", "stale"])
def test_no_fixed_number_of_nodes_is_better_than_the_search(mode: str, minimize: Any) -> None:
    request = asked(mode, minimize=minimize, devices=(T4,))
    found = score(request, decided(request, GPUS).chosen.prediction)
    for nodes in (1, 2, 3, 4):
        for ranks in (2, 4):
            fixed = decided(replace(request, fixed=(FixedChoice(T4, nodes, ranks),)), GPUS).chosen
            assert found <= score(request, fixed.prediction) * 1.02, fixed.summary


def test_a_single_rank_has_no_server() -> None:
    assert len(decided(asked("synchronous", nodes_max=1, cpu_per_pod=1.0), ONE).chosen.groups[0].shares) == 1
    wrong = rejected(asked("asynchronous", nodes_max=1, cpu_per_pod=1.0), ONE)
    assert "2 ranks" in wrong.message or any("2 ranks" in each.reason for each in wrong.refusals), wrong
