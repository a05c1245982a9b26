"""Other policies. They count devices by type and ignore how free devices are spread over nodes, which favours them.

- ``Fixed``: the user chose the number of devices; the job runs until its end on the fastest type that has as many free.
  In order of arrival (FCFS) or of deadlines (EDF). The first job that finds no devices stops the line.
- ``EvenSplit``: all active jobs get about as many devices; decided anew at each arrival and end.
- ``Goodput``: like Pollux, maximizes the sum of fair shares' speed-ups (power -1) over all active jobs each minute.
  Simplified: the batch is fixed, so goodput is throughput; a job uses one device type (as Sia's text does for Pollux on
  mixed pools); greedy ascent instead of a genetic algorithm; a move must pay for its restart.
- ``Clairvoyant``: knows true run times. At each arrival and end, all jobs start small, the shortest first, and then
  grow where it helps most. The benchmark takes the best of several weights of short jobs, and of the operator's
  own assignment of all jobs with true run times. It is no lower bound: the optimum is not known.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.scheduling.simulator import Run, State
from benchmarks.scheduling.uses import Use, fastest
from benchmarks.scheduling.workload import POOL, START_S

Free = Counter[str]


def run_of(use: Use) -> Run:
    return Run((use.device, use.devices), use.devices, use.seconds, use.energy_J, use.device)


def all_free() -> Free:
    return Counter({device: nodes * per_node for device, nodes, per_node in POOL})


def kept(active: Sequence[State], free: Free) -> dict[str, Run | None]:
    """Return the runs of jobs that run, and take their devices from ``free``."""
    wanted: dict[str, Run | None] = {}
    for state in active:
        if state.run is not None:
            wanted[state.job.name] = state.run
            free[state.run.device] -= state.run.devices
    return wanted


@dataclass
class Fixed:
    """Users choose sizes. ``urgency``: returns the sort key of the line."""

    urgency: Callable[[State], float]
    tick_s: float = inf

    def decide(self, now_s: float, active: Sequence[State]) -> Mapping[str, Run | None]:
        free = all_free()
        wanted = kept(active, free)
        for state in sorted((each for each in active if each.run is None), key=self.urgency):
            fitting = [use for use in sized(state) if use.devices <= free[use.device]]
            if not fitting:
                break
            use = fastest(fitting)
            free[use.device] -= use.devices
            wanted[state.job.name] = run_of(use)
        return wanted


def sized(state: State) -> list[Use]:
    """Return the uses of each type with the number of devices that the user chose, or the next smaller one."""
    found: dict[str, Use] = {}
    for use in state.job.uses:
        if use.devices <= state.job.user_devices:
            found[use.device] = use
    return list(found.values())


def fcfs() -> Fixed:
    return Fixed(lambda state: state.job.arrival_s)


def edf() -> Fixed:
    return Fixed(lambda state: state.job.deadline_s)


@dataclass
class EvenSplit:
    tick_s: float = inf
    names: tuple[str, ...] = ()

    def decide(self, now_s: float, active: Sequence[State]) -> Mapping[str, Run | None]:
        names = tuple(state.job.name for state in active)
        if names == self.names:
            return {state.job.name: state.run for state in active}
        self.names, free = names, all_free()
        wanted: dict[str, Run | None] = {}
        for i, state in enumerate(active):
            share = max(1, round(sum(free.values()) / (len(active) - i)))
            fitting = [use for use in state.job.uses if use.devices <= min(share, free[use.device])]
            use = fastest(fitting) if fitting else None
            wanted[state.job.name] = run_of(use) if use else None
            if use is not None:
                free[use.device] -= use.devices
        return wanted


def ascend(
    states: Sequence[State], free: Free, worth: Callable[[State, Use | None, Use], float]
) -> dict[str, Use | None]:
    """Give devices to jobs one step after another: the step with the greatest worth per device first.

    ``worth(state, old, new)`` is the worth of a change; a change that is worth nothing is not made.
    """
    chosen: dict[str, Use | None] = {state.job.name: None for state in states}
    while True:
        best: tuple[float, State, Use] | None = None
        for state in states:
            old = chosen[state.job.name]
            for use in state.job.uses:
                mine = old.devices if old is not None and old.device == use.device else 0
                more = use.devices - (old.devices if old is not None else 0)
                if use.devices - mine > free[use.device] or (old is not None and use.seconds >= old.seconds):
                    continue
                value = worth(state, old, use) / max(more, 0.5)
                if value > 0 and (best is None or value > best[0]):
                    best = (value, state, use)
        if best is None:
            return chosen
        _, state, use = best
        old = chosen[state.job.name]
        if old is not None:
            free[old.device] += old.devices
        free[use.device] -= use.devices
        chosen[state.job.name] = use


@dataclass
class Goodput:
    tick_s: float = 60.0

    def decide(self, now_s: float, active: Sequence[State]) -> Mapping[str, Run | None]:
        base = {state.job.name: fastest(state.job.uses[:1]).seconds for state in active}

        def worth(state: State, old: Use | None, new: Use) -> float:
            seconds = base[state.job.name]
            return (10.0 if old is None else old.seconds / seconds) - new.seconds / seconds

        chosen = ascend(active, all_free(), worth)
        return settled(active, chosen, lambda state, use: state.left * use.seconds)


CLAIRVOYANT_POWERS = (1.5, 2.0, 2.5)


@dataclass
class Clairvoyant:
    """Knows true run times. ``power``: the higher, the more devices go to short jobs (1: relative gains count)."""

    power: float
    tick_s: float = inf

    def decide(self, now_s: float, active: Sequence[State]) -> Mapping[str, Run | None]:
        def left_s(state: State, use: Use) -> float:
            return state.left * use.seconds * state.job.noise

        def worth(state: State, old: Use | None, new: Use) -> float:
            if old is None:  # First start short jobs, then let all grow.
                return 1e9 / left_s(state, new)
            return float((left_s(state, old) - left_s(state, new)) / left_s(state, old) ** self.power)

        return settled(active, ascend(active, all_free(), worth), left_s)


def settled(
    active: Sequence[State], chosen: Mapping[str, Use | None], left_s: Callable[[State, Use], float]
) -> dict[str, Run | None]:
    """Return the chosen runs, but a running job stays if it gains too little and its devices are free."""
    free = all_free()
    for use in chosen.values():
        if use is not None:
            free[use.device] -= use.devices
    wanted: dict[str, Run | None] = {}
    for state in active:
        use = chosen[state.job.name]
        wanted[state.job.name] = run_of(use) if use is not None else None
        if state.run is None or use is None or run_of(use) == state.run:
            continue
        device, devices = state.run.device, state.run.devices
        stays = next(each for each in state.job.uses if (each.device, each.devices) == (device, devices))
        gained = left_s(state, stays) - left_s(state, use) - START_S
        free[use.device] += use.devices
        if gained < max(60.0, 0.1 * left_s(state, stays)) and devices <= free[device]:
            free[device] -= devices
            wanted[state.job.name] = state.run
        else:
            free[use.device] -= use.devices
    return wanted
