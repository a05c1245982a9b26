"""An event simulator of training jobs on a pool: arrivals, starts, moves with a restart, and ends.

A policy decides what each job uses. The simulator knows the true speed of a job: predicted seconds times its noise. A
job that starts or moves makes no progress for ``START_S``. A move loses no step: a planned stop writes a checkpoint.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Protocol

from benchmarks.scheduling.workload import START_S, Job

SHORT_S = 1e-6


@dataclass(frozen=True)
class Run:
    """What a job runs on. ``what``: anything that changes when the job must restart. Seconds of the whole training."""

    what: Hashable
    devices: int
    seconds: float
    energy_J: float
    device: str = ""
    """Type of the devices, for policies that use one type for a job."""


@dataclass
class State:
    """A job in the simulation. Policies must not read ``job.noise``; the clairvoyant one may."""

    job: Job
    left: float = 1.0
    """Part of the training that is left."""
    run: Run | None = None
    wait_s: float = 0.0
    """Seconds without progress that are left of a start."""
    started_s: float = nan
    moved_s: float = -inf
    ended_s: float = nan
    energy_J: float = 0.0
    moves: int = 0

    def left_s(self, run: Run, noise: float) -> float:
        return self.left * run.seconds * noise


class Policy(Protocol):
    tick_s: float
    """Seconds between decisions without an event; infinity: none."""

    def decide(self, now_s: float, active: Sequence[State]) -> Mapping[str, Run | None]:
        """Return what each active job shall use now, by name. Active: arrived and not ended, in order of arrival."""
        ...


@dataclass
class Result:
    """The states at the end, and the device-seconds that jobs held."""

    states: list[State] = field(default_factory=list)
    held_s: float = 0.0
    end_s: float = 0.0


def simulate(jobs: Sequence[Job], policy: Policy, devices: int) -> Result:
    """Run a stream of jobs under a policy. ``devices``: size of the pool, which no decision may exceed."""
    result = Result([State(job) for job in jobs])
    now_s, arrived = 0.0, 0
    while arrived < len(jobs) or any(state.ended_s != state.ended_s for state in result.states):
        while arrived < len(jobs) and jobs[arrived].arrival_s <= now_s + SHORT_S:
            arrived += 1
        active = [state for state in result.states[:arrived] if state.ended_s != state.ended_s]
        wanted = policy.decide(now_s, active) if active else {}
        for state in active:
            _apply(state, wanted.get(state.job.name), now_s)
        used = sum(state.run.devices for state in active if state.run is not None)
        assert used <= devices, f"{used} devices are used of {devices}"
        ends = [_end_s(state) for state in active if state.run is not None]
        arrival_s = jobs[arrived].arrival_s - now_s if arrived < len(jobs) else inf
        step_s = min([arrival_s, policy.tick_s if active else inf, *ends])
        assert step_s < inf, f"nothing happens any more, with {len(active)} jobs"
        for state in active:
            _advance(state, step_s, now_s)
        now_s += step_s
        result.held_s += used * step_s
    result.end_s = now_s
    return result


def _apply(state: State, run: Run | None, now_s: float) -> None:
    old, state.run = state.run, run
    if run is None or (old is not None and old.what == run.what):
        return
    if state.started_s != state.started_s:
        state.started_s = now_s
    else:
        state.moves += 1
    state.moved_s, state.wait_s = now_s, START_S


def _end_s(state: State) -> float:
    assert state.run is not None
    return state.wait_s + state.left_s(state.run, state.job.noise)


def _advance(state: State, step_s: float, now_s: float) -> None:
    if state.run is None:
        return
    ends = _end_s(state) <= step_s + SHORT_S
    works_s = max(0.0, step_s - state.wait_s)
    state.wait_s = max(0.0, state.wait_s - step_s)
    done = state.left if ends else min(state.left, works_s / (state.run.seconds * state.job.noise))
    state.left -= done
    state.energy_J += done * state.run.energy_J * state.job.noise
    if ends:
        state.left, state.run, state.ended_s = 0.0, None, now_s + step_s
