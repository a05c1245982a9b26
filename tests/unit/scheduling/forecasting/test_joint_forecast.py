"""Forecasts of a queue whose devices are assigned to all jobs together, and the calibration of their intervals."""

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest

from dljob.scheduling import Forecast, Interval
from dljob.scheduling.assignment import Assignment, Held, Option
from dljob.scheduling.forecasting import joint_simulation
from dljob.scheduling.forecasting.calibration import MEMORY, Calibration, lower, upper
from dljob.scheduling.forecasting.joint_forecast import (
    MAX_WORK,
    SCENARIOS,
    JointQueue,
    RecentJoint,
    draw,
    expected,
    forecast_jointly,
)
from dljob.scheduling.forecasting.joint_simulation import (
    Budget,
    Costs,
    Ending,
    JointArrival,
    JointJob,
    _Simulation,
    simulate_joint,
)

COSTS = Costs(start_s=45.0, restart_s=45.0, rest_s=600.0)
FIRST, SECOND = ("team", "first"), ("team", "second")


def job(name: str, one_s: float, most: int = 8, **fields: Any) -> JointJob:
    """Return a job that needs ``one_s`` seconds on one device, and scales ideally up to ``most`` devices."""
    sizes = [n for n in (1, 2, 4, 8) if n <= most]
    options = tuple(Option("t4", 1, n, one_s / n) for n in sizes)
    return replace(JointJob(("team", name), 0, options), **fields)


def runs(name: str, one_s: float, devices: int, most: int = 8, **fields: Any) -> JointJob:
    return job(name, one_s, most, held=Held({"t4": devices}, one_s / devices), **fields)


def starts(
    *jobs: JointJob, free: int = 0, budget: Budget | None = None, factor: float = 1.0, **more: Any
) -> dict[str, float]:
    factors = [factor] * (len(jobs) + len(more.get("arrivals", ())))
    found = simulate_joint(jobs, factors, {"t4": free}, COSTS, budget=budget, **more)
    return {key[1]: start_s for key, (start_s, _) in found.items()}


def test_waiting_job_gets_devices_of_a_job_when_its_rest_ends() -> None:
    long, short = runs("long", 800_000, 8, rest_s=300.0), job("short", 8000)
    assert starts(long, short) == {"short": pytest.approx(300.0)}
    assert starts(replace(long, rest_s=inf), short) == {"short": pytest.approx(100_000)}


def test_first_decision_comes_when_it_is_due_or_at_an_event() -> None:
    line = job("short", 8000)
    assert starts(line, free=8, first_s=7.0) == {"short": pytest.approx(7.0)}
    assert starts(runs("long", 800_000, 8), line, first_s=7.0) == {"short": pytest.approx(7.0)}
    assert starts(runs("first", 40, 4), runs("long", 800_000, 4), line, first_s=60.0)["short"] == pytest.approx(10.0)


def test_decisions_follow_soon_after_a_change_and_otherwise_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job starts at once. The second one waits, and the third one arrives."""
    decided_s = list[float]()
    decide = _Simulation._decide

    def counted(self: _Simulation) -> bool:
        decided_s.append(self.now_s)
        return decide(self)

    monkeypatch.setattr(_Simulation, "_decide", counted)
    large = replace(job("large", 800_000), options=(Option("a100", 1, 1, 1e5),))
    arrival = JointArrival(100.0, replace(large, key=("team", "other")))
    endings = [Ending(200.0, {"a100": 1})]
    found = starts(job("small", 80_000, first_part=0.001), large, free=8, arrivals=[arrival], endings=endings)
    assert found == {"small": 0.0, "large": pytest.approx(200.0)}
    assert decided_s == pytest.approx([0.0, 10.0, 45.0 + 10.0, 100.0, 160.0, 200.0])  # At 55 s, the first rest ends.


def test_job_that_has_started_may_move_after_its_first_steps() -> None:
    long = job("long", 800_000, first_part=0.001)
    for factor in (1.0, 2.0):
        simulation = _Simulation([long], [factor], {"t4": 8}, COSTS, (), (), Budget(inf), 0.0)
        simulation.run()
        assert simulation.active[0].rested_s == pytest.approx(COSTS.start_s + 100.0 * factor)


def test_job_that_moves_gets_its_part_before_a_waiting_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the controller, it has reserved its part before it stops, even if it is behind the other in the queue."""
    part = Option("a100", 1, 4, 1000.0)
    monkeypatch.setattr(joint_simulation, "assign_all", lambda *_: Assignment((part, part), (False, True), ((), (0,))))
    waits, moves = (replace(each, options=(part,)) for each in (job("waits", 8000), runs("moves", 8000, 4)))
    simulation = _Simulation([waits, moves], [1.0, 1.0], {"a100": 4}, COSTS, (), (), Budget(inf), 0.0)
    assert simulation._decide()
    assert [each.devices for each in simulation.active] == [{}, {"a100": 4}]


def test_overdue_job_starts_before_shorter_ones_that_come_all_the_time() -> None:
    """It takes 1,000 s, and is therefore overdue after 2,000 s. Each of the short jobs holds the device for 145 s."""
    arrivals = [JointArrival(100.0 * n, job(f"short-{n}", 100, most=1)) for n in range(100)]
    for waited_s, first_s in ((0.0, 2000.0), (1500.0, 500.0)):
        long = job("long", 1000, most=1, waited_s=waited_s)
        assert first_s <= starts(long, free=1, arrivals=arrivals)["long"] <= first_s + 145.0


def test_waiting_job_waits_for_the_end_of_a_job_that_a_move_does_not_repay() -> None:
    assert starts(runs("first", 4000, 8), job("second", 8000)) == {"second": pytest.approx(500)}
    assert starts(runs("first", 4000, 8), job("second", 8000), factor=1.5) == {"second": pytest.approx(750)}
    assert starts(runs("first", 4000, 8, starting_s=45.0), job("second", 8000)) == {"second": pytest.approx(545)}


def test_job_that_arrives_takes_a_share_of_what_becomes_free() -> None:
    first, second = runs("first", 4000, 8, most=8), job("second", 800_000)
    arrival = JointArrival(100.0, job("third", 800_000))
    [(start_s, alone_s)] = simulate_joint([first, second], [1.0, 1.0], {}, COSTS).values()
    [(same_s, end_s)] = simulate_joint([first, second], [1.0] * 3, {}, COSTS, [arrival]).values()
    assert (start_s, same_s) == (pytest.approx(500), pytest.approx(500)) and end_s > 1.5 * alone_s


def test_devices_outside_the_assignment_become_free() -> None:
    assert starts(job("only", 8000), endings=[Ending(70.0, {"t4": 4})]) == {"only": pytest.approx(70.0)}
    assert starts(job("only", 8000)) == {"only": inf}


def test_part_goes_to_the_job_for_which_it_is_reserved() -> None:
    """Free devices of another job's part are not available, as in the controller."""
    small, large = job("small", 1000, most=1), replace(job("large", 100_000), options=(Option("t4", 1, 8, 1e4),))
    found = starts(runs("first", 4000, 7), small, large, free=1)
    assert found["small"] == 0.0 and found["large"] > 500


def test_without_budget_jobs_start_in_order_as_devices_become_free() -> None:
    budget = Budget(0.0)
    found = starts(runs("long", 800_000, 8), job("second", 8000), job("third", 8000), budget=budget)
    assert found == {"second": pytest.approx(100_000), "third": pytest.approx(101_045)}


def test_work_of_a_forecast_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty waiting and sixty running jobs take no more decisions than the budget allows."""
    decided = list[int]()
    spend = Budget.spend

    def counted(self: Budget, jobs: int) -> bool:
        allowed = spend(self, jobs)
        if allowed:
            decided.append(jobs * jobs)
        return allowed

    monkeypatch.setattr(Budget, "spend", counted)
    random = Random(0)
    running = [runs(f"r{i}", random.uniform(1e4, 1e6), 4) for i in range(60)]
    line = [job(f"w{i}", random.uniform(1e4, 1e6)) for i in range(60)]
    recent = [RecentJoint(60.0 * i, line[i]) for i in range(20)]
    found = forecast_jointly(JointQueue([*running, *line], {}, COSTS, recent))
    assert len(found) == 60 and all(each.start.p50 < inf for each in found.values())
    assert sum(decided) <= MAX_WORK + SCENARIOS * max(decided)


def test_each_scenario_draws_another_run_time_and_other_arrivals() -> None:
    mine = job("mine", 8000, spread=1.3)
    factors = sorted(draw(mine, n) for n in range(SCENARIOS))
    assert len(set(factors)) == SCENARIOS and factors[0] * factors[-1] == pytest.approx(1.0)
    assert [draw(mine, n) for n in range(SCENARIOS)] == [draw(mine, n) for n in range(SCENARIOS)]
    assert expected([RecentJoint(0.0, mine)], 0) != expected([RecentJoint(0.0, mine)], 1)


def test_forecast_has_a_median_and_bounds() -> None:
    found = forecast_jointly(JointQueue([runs("first", 4000, 8, spread=1.3), job("second", 8000)], {}, COSTS))
    start = found[SECOND].start
    assert start.p10 < 500 / 1.2 and start.p50 == pytest.approx(500, rel=0.05) and start.p90 > 500 * 1.2
    assert FIRST not in found


def test_conformal_bounds_hold_for_new_scores_of_any_distribution() -> None:
    random, held = Random(1), 0
    for _ in range(400):
        scores = [random.lognormvariate(0.3, 1.5) for _ in range(60)]
        held += lower(scores) <= random.lognormvariate(0.3, 1.5) <= upper(scores)
    assert 0.87 <= held / 400 <= 0.95


def test_calibration_forgets_its_prior_and_learns_from_waits() -> None:
    calibration = Calibration(([1.0], [1.0]))
    forecast = Interval(440.0, 540.0, 640.0)
    assert calibration.interval(forecast) == forecast
    for _ in range(MEMORY):
        calibration.note(forecast, 1340.0)
        calibration.note(forecast, 5.0)  # Shorter than the operator measures.
        calibration.note(Interval(0.0, inf, inf), 1000.0)
    found = calibration.interval(forecast)
    assert (found.p10, found.p50, found.p90) == (540.0, 540.0, pytest.approx(1340.0))
    assert calibration.interval(Interval(inf, inf, inf)) == Interval(inf, inf, inf)


def test_bounds_of_the_end_follow_those_of_the_start() -> None:
    calibration = Calibration(([0.5] * 50, [2.0] * 50))
    found = calibration.forecast(Forecast(Interval(540, 560, 580), Interval(900, 1000, 1100)))
    assert found.start == Interval(240.0, 560.0, 1220.0) and found.end == Interval(600.0, 1000.0, 1740.0)
