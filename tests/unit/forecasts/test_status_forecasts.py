"""Tests of the forecasts in the status of a job, and of the condition DeadlineFeasible."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import StartupMarks
from dljob.api import DLJobStatus
from dljob.job.observed import Observed, Outlook
from dljob.reconcile.forecasts import steady
from support.builders import CREATED, DIGITS, NOW, Json, after, changed, nodes, report, seen
from support.job_lifecycle import condition_of, done, status, step, training, verdict

BUSY = nodes({"name": "a", "device": "cpu", "cpu": 4})
"""Too few nodes for the job."""


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def due(seconds: float) -> Json:
    return {"scheduling": {"finishBy": at(seconds).isoformat()}}


def waiting(outlook: Outlook | None, spec: Json | None = None, place: tuple[int, int] = (1, 2)) -> Observed:
    return seen(DIGITS | (spec or {}) | {"nodes": {"min": 3, "max": 3}}, BUSY, place=place, outlook=outlook)


OUTLOOK = Outlook(at(500), at(1000), at(2000), at(3000))


def test_waiting_job_shows_place_and_forecast() -> None:
    first = step(waiting(OUTLOOK))
    found = status(first).queue
    assert found is not None and (found.position, found.jobs) == (1, 2)
    assert (found.earliest_start, found.forecast_start, found.latest_start) == (at(500), at(1000), at(2000))
    message = condition_of(first, "Admitted").message
    assert "number 1 of 2 in the queue; the job is predicted to start at 2026-03-01T12:16:40Z" in message
    assert status(first).forecast is None, "it holds nothing"


def test_small_changes_are_not_shown() -> None:
    """A status that changes each minute would be written each minute, for every waiting job."""
    observed = waiting(OUTLOOK, due(10_000))
    first = step(observed)
    later = replace(after(observed, first), outlook=Outlook(at(520), at(1080), at(2100), at(3200)))
    assert status(step(later, 60)) == status(first)
    much_later = replace(later, outlook=Outlook(at(520), at(1500), at(2100), at(3200)))
    found = status(step(much_later, 60)).queue
    assert found is not None and found.forecast_start == at(1500)


@given(st.integers(-5000, 5000), st.integers(-5000, 5000))
def test_steady_time_is_close_to_the_forecast(shown_s: int, found_s: int) -> None:
    got = steady(at(shown_s), at(found_s), NOW)
    assert got is not None and got >= NOW, "fixed bug: a start in the past was shown for a minute"
    assert abs((got - max(at(found_s), NOW)).total_seconds()) <= max(60, 0.1 * found_s)
    assert steady(got, at(found_s), NOW) == got
    assert steady(None, at(found_s), NOW) == (at(found_s) if found_s >= 0 else at(60))
    assert steady(at(shown_s), None, NOW) is None


def test_late_time_changes_once_a_minute_at_most() -> None:
    """A job that should have started is predicted to start right away, at each reconcile."""
    shown, times = at(0), set()
    for second in range(1, 600):
        now = at(second)
        got = steady(shown, now + timedelta(seconds=1), now)
        assert got is not None and got >= now
        shown = got
        times.add(got)
    assert len(times) <= 11


@pytest.mark.parametrize(
    ("outlook", "finish_s", "expected"),
    [
        (OUTLOOK, 3000, ("True", "InTime")),
        (OUTLOOK, 2999, ("False", "TooLate")),
        (OUTLOOK, -1, ("False", "DeadlinePassed")),
        (None, 3000, ("Unknown", "NoForecast")),
        (Outlook(None, None, None, None), 3000, ("Unknown", "NoForecast")),
    ],
)
def test_deadline_of_a_waiting_job(outlook: Outlook | None, finish_s: float, expected: tuple[str, str]) -> None:
    found = step(waiting(outlook, due(finish_s)))
    assert verdict(found, "DeadlineFeasible") == expected
    message = condition_of(found, "DeadlineFeasible").message
    assert message.startswith("spec.scheduling.finishBy: found 2026-03-01T")
    if expected[1] == "TooLate":
        assert "expected 2026-03-01T12:50:00Z or later" in message


def test_deadline_does_not_flap_and_causes_one_event() -> None:
    observed = waiting(OUTLOOK, due(2900))
    late = step(observed)
    assert [event.type for event in late.events if event.reason == "TooLate"] == ["Warning"]
    barely = replace(after(observed, late), outlook=replace(OUTLOOK, finish_p90=at(2890)))
    still = step(barely, 1)
    assert verdict(still, "DeadlineFeasible") == ("False", "TooLate") and not still.events
    early = replace(after(barely, still), outlook=replace(OUTLOOK, finish_p90=at(2000)))
    again = step(early, 2)
    assert verdict(again, "DeadlineFeasible") == ("True", "InTime")
    assert [event.type for event in again.events] == ["Normal"]


def test_next_operator_shows_the_forecast_until_it_has_its_own() -> None:
    observed = waiting(OUTLOOK, due(2900))
    first = step(observed)
    restarted = replace(after(observed, first), outlook=None, place=(2, 3))
    found = step(restarted, 1)
    before = status(first).queue
    assert before is not None and status(found).queue == before.model_copy(update={"position": 2, "jobs": 3})
    assert verdict(found, "DeadlineFeasible") == ("False", "TooLate") and not found.events
    planning = step(replace(restarted, place=None, view=None), 2)
    assert status(planning).queue == before and not planning.events


def test_job_without_a_deadline_has_no_condition_and_a_removed_one_is_unknown() -> None:
    assert not any(c.type == "DeadlineFeasible" for c in status(step(waiting(OUTLOOK))).conditions)
    observed = waiting(OUTLOOK, due(2900))
    removed = changed(after(observed, step(observed)), scheduling={})
    found = step(replace(removed, place=(1, 2), outlook=OUTLOOK), 1)
    assert verdict(found, "DeadlineFeasible") == ("Unknown", "NoDeadline") and not found.events


def test_running_job_shows_what_a_stop_costs() -> None:
    observed = training(DIGITS | due(10**6))
    found = status(step(observed, 100))
    forecast = found.forecast
    assert forecast is not None and forecast.remaining_seconds_p10 is not None
    assert forecast.remaining_seconds_p10 <= forecast.remaining_seconds <= forecast.remaining_seconds_p90
    assert forecast.restart_seconds > 0 and forecast.sizes[0].total_seconds == min(
        s.total_seconds for s in forecast.sizes
    )
    assert found.plan is not None and found.plan.nodes in [size.nodes for size in forecast.sizes]
    assert verdict(step(observed, 100), "DeadlineFeasible") == ("True", "InTime")


@pytest.mark.parametrize(("admitted_s", "first_step_s"), [(0, 47), (5000, 5047)])
def test_restart_in_the_forecast_does_not_include_the_wait_for_admission(admitted_s: int, first_step_s: int) -> None:
    """A job that waited for hours in the queue does not wait so again after each restart."""
    marks = StartupMarks(first_step_unix_s=CREATED.timestamp() + first_step_s)
    observed = training()
    before = observed.job.status.copy()
    before["startTime"] = (CREATED + timedelta(seconds=admitted_s)).isoformat()
    observed = replace(observed, job=replace(observed.job, status=before), report=report(observed, startup=marks))
    found = status(step(observed, 6000))
    assert found.startup is not None and found.startup.total_seconds == first_step_s
    assert found.forecast is not None and found.forecast.restart_seconds == 47


def test_cost_of_a_stop_does_not_contain_a_wait_since_the_checkpoint() -> None:
    """Fixed bug: a job that had been preempted for ten hours seemed to lose ten hours if it was stopped again."""
    observed = training(DIGITS)
    mark = {"step": 6, "unix_s": NOW.timestamp() - 36_000}
    observed = replace(observed, report=report(observed, step=10, step_s=0.5, last_checkpoint=mark))
    forecast = status(step(observed, 100)).forecast
    assert forecast is not None and forecast.unsaved_seconds == 2


def test_forecast_of_a_running_job_alone_is_not_written() -> None:
    observed = training(DIGITS | due(10**6))
    first = step(observed, 100)
    again = step(after(observed, first), 110)
    assert status(again) == status(first)


def test_deadline_change_takes_effect_without_a_restart() -> None:
    observed = training(DIGITS)
    found = step(changed(observed, **due(10**6)), 100)
    assert not found.scales and verdict(found, "DeadlineFeasible") == ("True", "InTime")
    assert found.plan is not None and found.plan.plan.number == 1


def test_job_is_looked_at_again_when_its_deadline_passes() -> None:
    observed = training(DIGITS | due(200))
    first = step(observed, 100)
    assert first.requeue_after_s is not None and first.requeue_after_s <= 101
    passed = step(after(observed, first), 201)
    assert verdict(passed, "DeadlineFeasible") == ("False", "DeadlinePassed") and not passed.scales
    assert [event.type for event in passed.events] == ["Warning"]


@pytest.mark.parametrize(("finish_s", "expected"), [(10**6, ("True", "DeadlineMet")), (1, ("False", "DeadlineMissed"))])
def test_deadline_of_a_complete_job(finish_s: float, expected: tuple[str, str]) -> None:
    observed = done(spec=DIGITS | due(finish_s))
    ended = step(observed, 50)
    again = step(after(observed, ended), 60)
    assert verdict(again, "DeadlineFeasible") == expected
    assert status(again).forecast is None and status(again).queue is None


def test_status_of_an_older_release_is_read() -> None:
    assert DLJobStatus.model_validate({}).queue is None
