"""Compare the operator's moves of running jobs with a clairvoyant planner, on random pools with disturbances.

    python -m benchmarks.scheduling.deadlines [--cases 1000] [--seed 1] [--check]

Each case has one job that minimizes energy with a deadline, a pool of one to three device types, and a disturbance: at
a random time, a device type becomes slower for the rest of the job (in two of three cases). True step times differ from
the predicted ones by a log-normal factor for each device type. The operator's decisions are its own code: the score of
plans (``planner.search.objective``), pace and moves (``scheduling.pace``), with the operator's limits on how often a
job moves. ``fixed`` is the same planner without moves.

The clairvoyant planner knows all true step times and the disturbance. It uses the plans with the least energy that meet
the deadline: one plan, or two plans with a restart in between at any of ``SWITCHES`` times.

What is simplified: one plan is a number of nodes of one device type, its power is constant, and a step is perfectly
divisible work plus a communication time that grows with the number of nodes. Profiles learn the true step time of a
device type at once when measurements contradict the plan.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from statistics import mean, median

import numpy as np
from benchmarks.lib.goals import Figure, table

from dljob.planner import Request
from dljob.planner.search import objective
from dljob.planner.search.screen import Screened
from dljob.reconcile.planning.resize import MIN_RESTARTS_BETWEEN
from dljob.scheduling import Move, move_reason, pace_changed, pace_deadline_s, rest_after_move, rest_with_measured
from dljob.scheduling.gain import MIN_BETWEEN_S

SPREAD = 0.15
"""Standard deviation of the logarithm of (true / predicted step time)."""
P90 = exp(1.2816 * SPREAD)
LOOKS = 400
"""Number of reports of a job in the time of its deadline."""
SWITCHES = 40
MIN_MET, MAX_ENERGY = 0.95, 1.10
"""Goals for the part of deadlines that are met, and for the median and mean of energy / clairvoyant's."""


@dataclass(frozen=True)
class Plan:
    """Some nodes of one device type: predicted seconds for a step, and power in watts."""

    device: int
    nodes: int
    step_s: float
    power_W: float


@dataclass(frozen=True)
class Case:
    """``error``: true / predicted step time by device. ``slow_at_s``: when ``slow_device`` becomes slower."""

    plans: tuple[Plan, ...]
    steps: int
    deadline_s: float
    restart_s: float
    error: tuple[float, ...]
    slow_at_s: float
    slow_device: int
    slowdown: float

    def step_s(self, plan: Plan, at_s: float) -> float:
        """Return the true step time of a plan at a time."""
        slow = self.slowdown if plan.device == self.slow_device and at_s >= self.slow_at_s else 1.0
        return plan.step_s * self.error[plan.device] * slow

    def steps_done(self, plan: Plan, from_s: float, to_s: float) -> float:
        """Return the number of steps that a plan makes from one time to another."""
        middle_s = min(max(self.slow_at_s, from_s), to_s)
        before = (middle_s - from_s) / self.step_s(plan, from_s)
        return before + ((to_s - middle_s) / self.step_s(plan, middle_s) if to_s > middle_s else 0.0)

    def end_s(self, plan: Plan, from_s: float, left: float) -> float:
        """Return the time at which a plan that starts at ``from_s`` has made ``left`` steps."""
        if from_s < self.slow_at_s < inf:
            before = self.steps_done(plan, from_s, self.slow_at_s)
            if before < left:
                return self.slow_at_s + (left - before) * self.step_s(plan, self.slow_at_s)
        return from_s + left * self.step_s(plan, from_s)


@dataclass(frozen=True)
class Outcome:
    end_s: float
    energy_J: float
    moves: int = 0


def draw(rng: random.Random) -> Case:
    """Return a random case. The deadline is 1.2 to 4 times the predicted time of the fastest plan."""
    plans = []
    work_s, common_s = rng.uniform(0.2, 5.0), rng.uniform(0.002, 0.05)
    devices = rng.randint(1, 3)
    for device in range(devices):
        speed, power_W = rng.uniform(0.3, 1.0), rng.uniform(100, 500)
        for nodes in range(1, rng.randint(2, 16) + 1):
            step_s = work_s / speed / nodes + common_s * (nodes - 1)
            plans.append(Plan(device, nodes, step_s, nodes * power_W))
    fastest_s = min(plan.step_s for plan in plans)
    steps = round(rng.uniform(0.5, 10.0) * 3600 / fastest_s)
    deadline_s = rng.uniform(1.2, 4.0) * fastest_s * steps
    error = tuple(rng.lognormvariate(0.0, SPREAD) for _ in range(devices))
    disturbed = rng.random() < 2 / 3
    at_s = rng.uniform(0.05, 0.8) * deadline_s if disturbed else inf
    return Case(
        tuple(plans), steps, deadline_s, rng.uniform(20, 90), error, at_s, rng.randrange(devices), rng.uniform(1.1, 2.5)
    )


def choose(case: Case, factors: Sequence[float], deadline_s: float) -> Plan:
    """Return the planner's choice. ``factors``: learned true / predicted step time by device type.

    ``deadline_s``: infinite: it has passed, and the plan with the least energy is chosen.
    """
    step_s = np.array([plan.step_s * factors[plan.device] for plan in case.plans])
    energy_J = step_s * np.array([plan.power_W for plan in case.plans])
    screened = Screened(step_s, step_s * P90, energy_J, energy_J, energy_J, np.zeros(len(step_s), np.int64))
    request = Request("job", 1, case.steps, minimize="Energy").at_pace(deadline_s)
    return case.plans[int(np.argmin(objective.scores(request, screened)))]


def operator(case: Case, *, moves: bool) -> Outcome:
    """Run a job as the operator does. ``moves``: False: the job keeps its first plan."""
    factors = [1.0] * len(case.error)
    plan = choose(case, factors, case.deadline_s)
    if not moves:
        end_s = case.end_s(plan, objective.STARTUP_S, case.steps)
        return Outcome(end_s, end_s * plan.power_W)
    now_s, left, energy_J, count, moved_s = objective.STARTUP_S, float(case.steps), 0.0, 0, -inf
    energy_J += now_s * plan.power_W
    planned_pace: float | None = case.deadline_s
    every_s, expected_s = max(30.0, case.deadline_s / LOOKS), plan.step_s
    while True:
        then_s = now_s + every_s
        if case.end_s(plan, now_s, left) <= then_s:
            end_s = case.end_s(plan, now_s, left)
            return Outcome(end_s, energy_J + (end_s - now_s) * plan.power_W, count)
        left -= case.steps_done(plan, now_s, then_s)
        energy_J, now_s = energy_J + every_s * plan.power_W, then_s
        measured_s = case.step_s(plan, now_s - 1.0)
        contradicted = measured_s > expected_s * P90
        if contradicted:
            factors[plan.device], expected_s = measured_s / plan.step_s, measured_s
        slower = max(1.0, measured_s / expected_s)
        available_s = case.deadline_s - now_s if now_s < case.deadline_s else None
        pace_s = inf
        if available_s is not None:
            pace_s = pace_deadline_s(case.steps, int(left), available_s, case.restart_s, 0, slower)
        stay = rest_with_measured(int(left), measured_s, P90, plan.power_W)
        is_late = available_s is not None and stay.p90_s > available_s
        between_s = min(MIN_BETWEEN_S, MIN_RESTARTS_BETWEEN * case.restart_s) if is_late else MIN_BETWEEN_S
        if now_s - moved_s < between_s or not (contradicted or pace_changed(planned_pace, pace_s)):
            continue
        planned_pace = pace_s
        other = choose(case, factors, pace_s)
        step_s = other.step_s * factors[other.device]
        same = slower if other.device == plan.device else 1.0
        rest = rest_after_move(int(left), 0, step_s, step_s * P90, case.restart_s, other.power_W, same)
        found: Move | None = None if other == plan else move_reason(stay, rest, available_s)
        if found is not None:
            plan, moved_s, count, expected_s = other, now_s, count + 1, step_s
            energy_J, now_s = energy_J + case.restart_s * plan.power_W, now_s + case.restart_s


def clairvoyant(case: Case) -> Outcome | None:
    """Return the outcome with the least energy that meets the deadline; None if no plan meets it."""
    best: Outcome | None = None
    start_s = objective.STARTUP_S
    times = sorted({*(case.deadline_s * i / SWITCHES for i in range(1, SWITCHES)), case.slow_at_s} - {inf})
    for first in case.plans:
        end_s = case.end_s(first, start_s, case.steps)
        found = [Outcome(end_s, end_s * first.power_W)]
        for at_s in times:
            if not start_s < at_s < end_s:
                continue
            left = case.steps - case.steps_done(first, start_s, at_s)
            for second in case.plans:
                if second != first:
                    last_s = case.end_s(second, at_s + case.restart_s, left)
                    found.append(Outcome(last_s, at_s * first.power_W + (last_s - at_s) * second.power_W, 1))
        for each in found:
            if each.end_s <= case.deadline_s and (best is None or each.energy_J < best.energy_J):
                best = each
    return best


def compare(feasible: Sequence[tuple[Case, Outcome]], *, moves: bool) -> tuple[float, float, float, float]:
    """Return (part of the cases that meet the deadline; median, mean and p90 of energy / clairvoyant's in these).

    ``feasible``: cases in which the clairvoyant planner meets the deadline, with its outcome.
    """
    ratios = []
    for case, best in feasible:
        found = operator(case, moves=moves)
        if found.end_s <= case.deadline_s:
            ratios.append(found.energy_J / best.energy_J)
    ratios.sort()
    return len(ratios) / len(feasible), median(ratios), mean(ratios), ratios[int(0.9 * len(ratios))]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="fail if a figure misses its goal")
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    cases = [draw(rng) for _ in range(asked.cases)]
    feasible = [(case, best) for case in cases if (best := clairvoyant(case)) is not None]
    figures = []
    for name, moves in (("fixed", False), ("dljob", True)):
        met, middle, average, high = compare(feasible, moves=moves)
        goals = (MIN_MET, MAX_ENERGY) if moves else (None, None)
        figures.append(Figure(f"{name}: deadlines met of {len(feasible)} that can be met", met, low=goals[0]))
        figures.append(Figure(f"{name}: energy / clairvoyant's, median", middle, high=goals[1]))
        figures.append(Figure(f"{name}: energy / clairvoyant's, mean", average, high=goals[1]))
        figures.append(Figure(f"{name}: energy / clairvoyant's, p90", high))
    print(table(figures))
    return int(asked.check and any(figure.missed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
