"""Tests of running jobs that minimize carbon: what a move would save depends on the hours that are left."""

from dataclasses import replace
from datetime import datetime

import pytest

from dljob.api.defaults import JobDefaults
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.rest import judge
from support.builders import DIGITS, NOW
from support.job_lifecycle import training

BY_HOUR = [100.0] * 6 + [600.0] * 12 + [100.0] * 6
DEFAULTS = JobDefaults.model_validate({"energy": {"carbon": {"gramsPerKwhByHour": BY_HOUR}}})


def grams(now: datetime) -> tuple[float, float]:
    """Return the carbon of the remaining steps with the job's plan, and with the same plan after a restart."""
    observed = training(DIGITS | {"objective": {"minimize": "Carbon"}})
    parsed = replace(parse_observed(observed), defaults=DEFAULTS)
    assert parsed.accepted is not None
    _, text = judge(parsed, parsed.accepted, now)
    found = [float(part.split()[-1]) for part in text.split(" g CO2")[:2]]
    return found[0], found[1]


def test_remaining_steps_count_with_the_hours_in_which_they_run() -> None:
    day, night = grams(NOW.replace(hour=12)), grams(NOW.replace(hour=0))
    assert day[0] == pytest.approx(6 * night[0], rel=0.02) and day[1] == pytest.approx(6 * night[1], rel=0.02)
    assert night[0] < night[1], "a restart costs, too"
