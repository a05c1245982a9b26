"""Laws of the time that interruptions of nodes add to a training."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlcontract.checkpoint.interval import (
    BETWEEN_POD_FAULTS_S,
    COST_FRACTION,
    FIRST_S,
    LONGEST_S,
    SHORTEST_S,
    best_interval_s,
)
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


@given(st.floats(0.1, 300), st.floats(4, 1e4))
@example(30.0, 37.5)
def test_the_chosen_interval_is_nearly_the_best_one_however_often_nodes_are_interrupted(
    checkpoint_s: float, rarer: float
) -> None:
    """``rarer``: mean time between interruptions, as a multiple of the time of a checkpoint.

    Fixed bug: checkpoints took at most 2 % of the time. With 64 spot nodes and 0.05 interruptions of each an hour, a
    training was expected to take 2.4 times as long as without interruptions, instead of 1.4 times.
    """
    work_s, nodes = 1e6, 64
    model = Interruptions(3600 / (checkpoint_s * rarer * nodes), checkpoint_s)
    best_s = min(
        float(replace(model, interval_s=interval_s).expected_s(work_s, nodes))
        for interval_s in np.geomspace(SHORTEST_S, max(LONGEST_S, checkpoint_s / COST_FRACTION), 200)
    )
    assert float(model.expected_s(work_s, nodes)) <= 1.02 * best_s


def test_each_number_of_nodes_has_the_interval_that_the_trainer_would_choose() -> None:
    """The planner compares many numbers of nodes at once."""
    model, nodes = Interruptions(per_node_h=0.05, checkpoint_s=30), np.array([64, 1, 64, 2])
    intervals_s = [best_interval_s(30, 3600 / (0.05 * n)) for n in nodes.tolist()]
    assert intervals_s[0] == pytest.approx(260, abs=1) and intervals_s[1] > 5 * intervals_s[0]
    fixed = [float(replace(model, interval_s=s).expected_s(1e5, n)) for s, n in zip(intervals_s, nodes, strict=True)]
    assert np.asarray(model.expected_s(np.full(4, 1e5), nodes)) == pytest.approx(np.array(fixed))
    assert fixed[0] / 1e5 == pytest.approx(1.416, abs=1e-3)


@given(st.floats(0.1, 300), st.one_of(st.none(), st.floats(5, 86400)), WORK, NODES)
def test_the_number_of_checkpoints_is_that_of_the_trainer(
    checkpoint_s: float, interval_s: float | None, work_s: float, nodes: int
) -> None:
    """The trainer writes one after each interval, in which none is being written, and one at the end."""
    model = Interruptions(0.0, checkpoint_s, interval_s)
    chosen_s = best_interval_s(checkpoint_s, BETWEEN_POD_FAULTS_S / nodes) if interval_s is None else interval_s
    count, at_s = 1, FIRST_S if interval_s is None else max(interval_s, checkpoint_s)
    while at_s < work_s:
        count, at_s = count + 1, at_s + max(chosen_s, checkpoint_s)
    assert abs(model.written(work_s, nodes) - count) <= 1 + 1e-6
    assert replace(model, checkpoints=False).written(work_s, nodes) == 0.0


@given(MODELS, WORK, NODES, st.floats(1, 10))
def test_longer_trainings_write_more_checkpoints(
    model: Interruptions, work_s: float, nodes: int, longer: float
) -> None:
    assert model.written(longer * work_s, nodes) >= model.written(work_s, nodes)
    assert not model.checkpoints or model.written(work_s, nodes) >= 1.0
