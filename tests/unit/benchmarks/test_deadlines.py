"""The simulation of jobs with a deadline, in cases whose results are known."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from benchmarks.scheduling.deadlines import Case, Plan, clairvoyant, draw, operator

FEW, MANY = Plan(0, 1, 1.0, 100.0), Plan(0, 4, 0.4, 400.0)
QUIET = Case((FEW, MANY), 10_000, 15_000.0, 30.0, (1.0,), inf, 0, 2.0)
"""Without a disturbance, one node meets the deadline with the least energy."""


def test_known_step_times_without_a_disturbance_give_the_clairvoyants_plan() -> None:
    best, found = clairvoyant(QUIET), operator(QUIET, moves=True)
    assert best is not None and found.moves == 0
    assert (found.end_s, found.energy_J) == pytest.approx((best.end_s, best.energy_J))
    assert found.end_s == pytest.approx(10_020.0)


def test_device_that_becomes_slow_makes_the_job_move_in_time() -> None:
    slow = replace(QUIET, slow_at_s=5_000.0)
    assert operator(slow, moves=False).end_s > slow.deadline_s + 20, "10,000 steps take 15,020 s"
    found, best = operator(slow, moves=True), clairvoyant(slow)
    assert found.end_s <= slow.deadline_s and 1 <= found.moves <= 2
    assert best is not None and best.energy_J <= found.energy_J * 1.02


def test_deadline_that_nothing_meets() -> None:
    assert clairvoyant(replace(QUIET, deadline_s=1000.0)) is None


def test_clairvoyant_never_uses_more_energy() -> None:
    """It tries one move at ``SWITCHES`` times, so the operator may be better by less than 2 %."""
    rng = Random(7)
    for case in [draw(rng) for _ in range(10)]:
        found, best = operator(case, moves=True), clairvoyant(case)
        if best is not None and found.end_s <= case.deadline_s and found.moves <= 1:
            assert best.energy_J <= found.energy_J * 1.02
