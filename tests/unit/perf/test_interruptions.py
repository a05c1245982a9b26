"""Laws of the time that interruptions of nodes add to a training."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.step.interruptions import RESTART_S, Interruptions

RATES = st.floats(1e-4, 20)
WORK = st.floats(1, 1e6)
NODES = st.integers(1, 500)
MODELS = st.builds(Interruptions, RATES, st.floats(0.1, 300), st.one_of(st.none(), st.floats(5, 86400)), st.booleans())


@given(MODELS, WORK, NODES, st.floats(1, 50))
def test_more_interruptions_never_shorten_the_expected_time(
    model: Interruptions, work_s: float, nodes: int, factor: float
) -> None:
    more = replace(model, per_node_h=model.per_node_h * factor)
    assert more.expected_s(work_s, nodes) >= model.expected_s(work_s, nodes) * (1 - 1e-3)
    assert model.expected_s(work_s, nodes) >= work_s


@given(MODELS, WORK, NODES)
def test_more_nodes_never_shorten_the_expected_time_of_the_same_work(
    model: Interruptions, work_s: float, nodes: int
) -> None:
    assert model.expected_s(work_s, nodes + 1) >= model.expected_s(work_s, nodes) * (1 - 1e-3)
    assert model.p90_s(work_s, nodes) >= 0


@given(MODELS, WORK, NODES)
def test_without_interruptions_nothing_changes(model: Interruptions, work_s: float, nodes: int) -> None:
    never = replace(model, per_node_h=0.0)
    assert never.expected_s(work_s, nodes) == work_s
    assert never.p90_s(work_s, nodes) == 0
    assert never.expected(work_s, nodes) == 0


def test_the_formula_agrees_with_a_simulation() -> None:
    model = Interruptions(per_node_h=0.5, checkpoint_s=10, interval_s=600)
    work_s, nodes, random = 6000.0, 4, np.random.default_rng(0)
    mean_s = 3600 / (0.5 * nodes)
    times = []
    for _ in range(4000):
        clock = done = 0.0
        while done < work_s:
            left = random.exponential(mean_s)
            if left >= 610:  # exponential times have no memory: every segment can draw its own
                clock, done = clock + 610, done + 600
                continue
            clock += left
            while (restart := random.exponential(mean_s)) < RESTART_S:
                clock += restart
            clock += RESTART_S
        times.append(clock)
    assert float(np.mean(times)) == pytest.approx(float(model.expected_s(work_s, nodes)), rel=0.03)
