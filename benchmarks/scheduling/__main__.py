"""Compare the operator's scheduling with other policies on job streams.

    python -m benchmarks.scheduling [--seeds 5] [--first-seed 0] [--jobs 160] [--load 1.0] [--noise 0.2] [--quota N]
        [--policy NAME] [--floors] [--check]

All policies see the same streams (``workload``) and plans that the operator's planner predicts. True run times are
these times a log-normal factor per job. Figures are medians over streams. ``--check`` fails (exit code 1) if the
policy ``dljob``, the operator's default, misses a goal or is not simulated with those it is compared to.
The modules ``baselines`` and ``operator_policy`` describe the policies and what is simplified. The forecasts are
made when jobs begin to wait, and compared with their waits (``foresight``).
"""

import argparse
import sys
from collections.abc import Callable

from benchmarks.lib.goals import Figure, table
from benchmarks.scheduling import foresight
from benchmarks.scheduling.baselines import CLAIRVOYANT_POWERS, Clairvoyant, EvenSplit, Goodput, edf, fcfs
from benchmarks.scheduling.measures import Measures, measures, median
from benchmarks.scheduling.operator_policy import Operator
from benchmarks.scheduling.policies import DEFAULT, FLOORS, POLICIES
from benchmarks.scheduling.simulator import Policy, simulate
from benchmarks.scheduling.workload import NOISE, POOL, Job, stream

DEVICES = sum(nodes * per_node for _, nodes, per_node in POOL)
FCFS, EDF, CLAIRVOYANT = "fcfs, users' sizes", "edf, users' sizes", "clairvoyant"
MAX_OF_FCFS, MAX_OF_CLAIRVOYANT, MIN_OF_EDF = 0.7, 1.1, 1.46
MAX_FORECAST_ERROR, MIN_COVERED, MAX_COVERED = 0.12, 0.85, 0.95
HEADS = ("average h", "p95 h", "makespan h", "deadlines %", "kWh/job", "used %", "moves/job")


def run(make: Callable[[], Policy], streams: list[tuple[Job, ...]]) -> list[Measures]:
    return [measures(simulate(jobs, make(), DEVICES), DEVICES) for jobs in streams]


def clairvoyant(streams: list[tuple[Job, ...]]) -> list[Measures]:
    """Return the best of several clairvoyant policies on each stream."""
    found = [run(lambda power=power: Clairvoyant(power), streams) for power in CLAIRVOYANT_POWERS]  # type: ignore[misc]
    found.append(run(lambda: Operator(1.0, all_jobs=True, clairvoyant=True), streams))
    return [min(each, key=lambda one: one.average_h) for each in zip(*found, strict=True)]


def run_operator(
    make: Callable[[float], Operator],
    streams: list[tuple[Job, ...]],
    noise: float,
    quota: int | None,
    found: list[foresight.Accuracy],
) -> list[Measures]:
    """Simulate a policy of the operator on each stream. Add the accuracy of its forecasts to ``found``.

    ``quota``: most devices that the jobs of a namespace use together; None: no limit.
    """
    each = []
    for jobs in streams:
        policy = make(noise)
        policy.joint.stream, policy.joint.allowed = jobs, () if quota is None else (quota,)
        result = simulate(jobs, policy, DEVICES)
        found.append(foresight.accuracy(policy.foresight, result))
        each.append(measures(result, DEVICES))
    return each


def forecasts(name: str, found: list[foresight.Accuracy]) -> list[Figure]:
    """Return how good the forecasts of the policy ``name`` are, over all streams."""
    count, error, covered = foresight.together(found)
    print(f"\n{name}: {count} jobs waited for at least {foresight.LEAST_WAIT_S:g} s")
    return [
        Figure(f"{name}: median error of the forecast wait", error, high=MAX_FORECAST_ERROR),
        Figure(f"{name}: starts within the forecast interval, lower bound", covered, low=MIN_COVERED),
        Figure(f"{name}: starts within the forecast interval, upper bound", covered, high=MAX_COVERED),
    ]


def row(name: str, found: Measures) -> str:
    percent = (100 * found.deadlines, 100 * found.used)
    return (
        f"{name:22} {found.average_h:9.2f} {found.p95_h:7.2f} {found.makespan_h:10.1f} {percent[0]:11.1f} "
        f"{found.energy_kWh:8.2f} {percent[1]:6.1f} {found.moves:9.1f}"
    )


def goals(name: str, found: dict[str, Measures]) -> list[Figure]:
    """Return the goals of the scheduler for the policy ``name``, beside those that were simulated."""
    dljob = found[name]
    figures = []
    if FCFS in found:
        figures.append(
            Figure(f"{name}: average time / FCFS", dljob.average_h / found[FCFS].average_h, high=MAX_OF_FCFS)
        )
    if CLAIRVOYANT in found:
        ratio = dljob.average_h / found[CLAIRVOYANT].average_h
        figures.append(Figure(f"{name}: average time / clairvoyant", ratio, high=MAX_OF_CLAIRVOYANT))
    if EDF in found:
        met = dljob.deadlines / max(1e-9, found[EDF].deadlines)
        figures.append(Figure(f"{name}: deadlines met / EDF", met, low=MIN_OF_EDF))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of streams")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first stream")
    parser.add_argument("--jobs", type=int, default=160, help="jobs of a stream")
    parser.add_argument("--load", type=float, default=1.0, help="factor of the jobs' device-hours")
    parser.add_argument("--noise", type=float, default=NOISE, help="sigma of log(true run time / predicted)")
    parser.add_argument("--quota", type=int, help="most devices of each namespace, for policies that respect it")
    parser.add_argument("--policy", action="append", help="simulate only this policy; may be repeated")
    parser.add_argument("--floors", action="store_true", help="also simulate forecasters that know the truth")
    parser.add_argument("--check", action="store_true", help="fail if a goal is missed")
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    streams = [stream(seed, given.jobs, given.load, given.noise) for seed in seeds]
    operators = {**POLICIES, **(FLOORS if given.floors else {})}
    foreseen: dict[str, list[foresight.Accuracy]] = {name: [] for name in operators}
    policies: dict[str, Callable[[], list[Measures]]] = {
        FCFS: lambda: run(fcfs, streams),
        EDF: lambda: run(edf, streams),
        "even split": lambda: run(EvenSplit, streams),
        "goodput, like Pollux": lambda: run(Goodput, streams),
        CLAIRVOYANT: lambda: clairvoyant(streams),
        **{
            name: lambda name=name, make=make: run_operator(  # type: ignore[misc]
                make, streams, given.noise, given.quota, foreseen[name]
            )
            for name, make in operators.items()
        },
    }
    if unknown := set(given.policy or ()) - policies.keys():
        parser.error(f"--policy: found {', '.join(sorted(unknown))}; expected one of {', '.join(policies)}")
    respecting = [name for name, make in operators.items() if make(0.0).all_jobs]
    if given.quota is not None and (ignoring := set(given.policy or policies) - set(respecting)):
        parser.error(
            f"--quota: found policies that ignore it: {', '.join(sorted(ignoring))}; expected --policy with only "
            f"{', '.join(respecting)}"
        )
    print(f"{given.seeds} streams of {given.jobs} jobs on {DEVICES} devices: {POOL}")
    widths = (9, 7, 10, 11, 8, 6, 9)
    print(f"{'policy':22} " + " ".join(f"{head:>{width}}" for head, width in zip(HEADS, widths, strict=True)))
    found: dict[str, Measures] = {}
    for name, simulated in policies.items():
        if not given.policy or name in given.policy or (given.floors and name in FLOORS):
            found[name] = median(simulated())
            print(row(name, found[name]), flush=True)
    judged = {name: goals(name, found) for name in POLICIES if name in found}
    if any(judged.values()):
        print("\n" + table([figure for figures in judged.values() for figure in figures]))
    accurate = {name: forecasts(name, each) for name, each in foreseen.items() if name in found}
    if accurate:
        print(table([figure for figures in accurate.values() for figure in figures]))
    missed = any(figure.missed for figure in (*judged.get(DEFAULT, ()), *accurate.get(DEFAULT, ())))
    return 1 if given.check and (missed or not judged.get(DEFAULT)) else 0


if __name__ == "__main__":
    sys.exit(main())
