"""Tests of the distance between equal runs, and of the intervals that follow from it."""

from datetime import UTC, datetime
from math import exp, log, sqrt

import pytest

from dlcontract import Report
from dljob.api import DLProfileStatus
from dljob.calibrate import Learned
from dljob.calibrate.learned import Repeats
from dljob.calibrate.repeats import ASSUMED_RUNS, MAX_RUNS, MOST, after, repeat_spread
from dljob.job.profiles import learned, updated_profile
from dljob.perf.step.step import SPREAD
from support.planner_questions import DIGITS, decided, view

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def run(
    compute_s: float,
    before: DLProfileStatus,
    share: int = 64,
    machine_nodes: int = 1,
    model: str = "mlp.digits",
) -> DLProfileStatus:
    rank = {"rank": 0, "device": "cpu", "share": share, "compute_s": compute_s}
    rank |= {"wait_s": 0.0, "comm_s": 0.0, "data_s": 0.0, "fetch_s": 0.0}
    about = {"uid": "u", "plan_number": 1, "plan_digest": "d", "term": 1, "unix_s": 1.0}
    report = Report.model_validate({**about, "phase": "Succeeded", "step": 100, "steps": 100, "ranks": [rank]})
    return updated_profile(before, model, "cpu", report, NOW, layout=(1, 1), machine_nodes=machine_nodes)


def test_runs_that_repeat_nothing_say_nothing() -> None:
    first = run(0.001, DLProfileStatus())
    assert first.repeats is None
    assert run(0.002, first, share=32).repeats is None
    assert run(0.002, first, machine_nodes=2).repeats is None
    assert after(None, []) is None
    assert after(Repeats(3, 0.2), []) == Repeats(3, 0.2)
    assert after(Repeats(3, 0.2), [(0.0 + 1, float("inf"))]) == Repeats(3, 0.2)


def test_a_repeat_is_stored_with_its_distance() -> None:
    again = run(0.0012, run(0.001, DLProfileStatus()))
    assert again.repeats is not None
    assert again.repeats.runs == 1
    assert again.repeats.deviation == pytest.approx(log(1.2))
    assert learned(again).repeats == Repeats(1, again.repeats.deviation)


def test_ranks_count_together_and_a_disturbance_has_a_limit() -> None:
    assert after(None, [(1.0, 1.2), (1.0, 1 / 1.2)]) == pytest.approx(Repeats(1, 0.0))
    assert after(None, [(1.0, 1e9)]) == Repeats(1, MOST)


def test_old_repeats_lose_weight() -> None:
    found = None
    for _ in range(5 * MAX_RUNS):
        found = after(found, [(1.0, exp(0.3))])
    for _ in range(5 * MAX_RUNS):
        found = after(found, [(1.0, exp(0.05))])
    assert found is not None
    assert found.runs == MAX_RUNS
    assert found.deviation < 0.07


def test_all_models_of_a_device_type_count_together() -> None:
    known = {
        ("mlp", "cpu"): Learned(repeats=Repeats(6, 0.2)),
        ("resnet18", "cpu"): Learned(repeats=Repeats(10, 0.1)),
        ("mlp", "gpu"): Learned(repeats=Repeats(10, 0.9)),
        ("lenet", "cpu"): Learned(),
    }
    squares = ASSUMED_RUNS * SPREAD["profile"] ** 2 + 6 * 0.2**2 + 10 * 0.1**2
    assert repeat_spread("cpu", known) == pytest.approx(sqrt(squares / (ASSUMED_RUNS + 16)))
    assert repeat_spread("cpu", {}) == SPREAD["profile"]


def test_intervals_are_at_least_as_wide_as_the_distance_of_repeats() -> None:
    """Other models' runs on the same devices widen the interval of a model that was measured once."""
    once = learned(run(0.02, DLProfileStatus(), share=DIGITS.global_batch, model="digits-cnn.digits"))
    pool = view({"cpu": 1, "memory": "4Gi"})
    alone = {(DIGITS.key(), "cpu"): once}
    noisy = alone | {("resnet18", "cpu"): Learned(repeats=Repeats(20, 0.4))}
    calm = alone | {("resnet18", "cpu"): Learned(repeats=Repeats(20, 0.01))}
    spreads = []
    for known in (calm, alone, noisy):
        found = decided(DIGITS, pool, known).chosen.prediction
        spreads.append(log(found.step_p90_s / found.step_s))
    assert spreads[0] < spreads[1] < spreads[2] / 3
