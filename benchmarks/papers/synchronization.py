"""Measure synchronous, stale-synchronous (SSP) and asynchronous runs of the trainer, and compare them with the model.

    python -m benchmarks.papers.synchronization [--workers 3] [--pause 0.15] [--steps 60] [--bound 2]

Real ranks run the trainer's real protocols: an all-reduce by the ring, or a parameter server without a barrier. Only
their computing is a pause of random length (gamma distribution, the same lengths for every kind), so that the ranks do
not compete for the processors of this machine. Each kind runs with equal workers, and with worker 0 slowed down.

    step      seconds per step of the slowest worker, which decide when the job ends
    updates   workers' steps per second while all of them train
    phases    synchronous: the mean seconds that a rank computes, communicates, waits for others and waits for input;
              their sum must be the step. SSP, asynchronous: computing of the slowest worker plus the server's time for
              the updates of all workers, one after another. Their round is shorter, as workers overlap these phases

The model (``perf.step.synchronization``, ``perf.step.asynchronous``) gets the mean computing time of the workers of
each run, and the time of an all-reduce without variation, or of the server for one update of a single worker.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH, local_plan, mpirun, run_with_messages
from benchmarks.papers.synchronization_ranks import SETTINGS_ENV

from dlcontract import ModelRef, OptimizerRef
from dljob.perf.step.synchronization import asynchronous_updates_per_s, stale_factor, straggler_factor

Kind = Literal["Synchronous", "StaleSynchronous", "Asynchronous"]
KINDS: tuple[Kind, ...] = ("Synchronous", "StaleSynchronous", "Asynchronous")
WARM = 5
"""First steps of each worker, which are not counted."""
PHASES = ("compute_s", "comm_s", "wait_s", "data_s")


@dataclass(frozen=True)
class Measured:
    """One run. ``phases_s``: the mean of each part of a step over the workers (``PHASES``)."""

    step_s: float
    updates_per_s: float
    phases_s: dict[str, float]
    compute_s: tuple[float, ...]
    """Mean computing seconds of each worker."""

    @property
    def sum_s(self) -> float:
        return sum(self.phases_s.values())


SGD = OptimizerRef(learning_rate=1e-3, momentum=0.0)


def run(
    kind: Kind,
    workers: int,
    slow_factor: float,
    variation: float,
    options: argparse.Namespace,
    optimizer: OptimizerRef = SGD,
    applies: bool = True,
) -> Measured:
    """Run the workers, and a server if the kind needs one, and return what was measured.

    ``applies``: False for a server that receives gradients and sends parameters, but never applies a gradient.
    """
    serving = int(kind != "Synchronous")
    shares = [8] * workers + [0] * serving
    plan = local_plan(
        shares, model=ModelRef(name="mlp"), steps=options.steps, synchronization=kind,
        collective="ParameterServer" if serving else "Ring",
        staleness_bound=options.bound if kind == "StaleSynchronous" else None,
        optimizer=optimizer,
    )  # fmt: skip
    last: dict[int, dict[str, Any]] = {}

    def on_message(line: str) -> None:
        message = json.loads(line)
        if message["type"] == "step" and message["rank"] < workers:
            last[message["rank"]] = message["measure"]

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "folder": folder, "pause_s": options.pause, "slow_factor": slow_factor, "variation": variation,
            "steps": options.steps, "width": options.width, "applies": applies,
        }  # fmt: skip
        env = {SETTINGS_ENV: json.dumps(settings), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
        command = [*mpirun(workers + serving), sys.executable, "-m", "benchmarks.papers.synchronization_ranks"]
        run_with_messages(plan, command, on_message, options.deadline, env, subprocess.DEVNULL)
        began = [json.loads(Path(folder, f"{r}.json").read_text())["began_s"] for r in range(workers)]
    return timed(began, last)


def timed(began_s: Sequence[Sequence[float]], measures: dict[int, dict[str, Any]]) -> Measured:
    """Return the pace of workers. ``began_s``: when each worker began its steps. ``measures``: mean phases."""
    counted = [times[WARM:] for times in began_s]
    step_s = max((times[-1] - times[0]) / (len(times) - 1) for times in counted)
    first, last = max(times[0] for times in counted), min(times[-1] for times in counted)
    updates = sum(sum(first < at <= last for at in times) for times in counted)
    phases = {name: fmean(measure[name] for measure in measures.values()) for name in PHASES}
    computed = tuple(measures[r]["compute_s"] for r in sorted(measures))
    return Measured(step_s, updates / (last - first), phases, computed)


@dataclass(frozen=True)
class Row:
    kind: Kind
    slow_factor: float
    measured: Measured
    predicted_step_s: float
    predicted_updates_per_s: float
    phases_s: float
    """The sum of the phases that the step of this kind would have if no two of them overlapped."""


def rows(options: argparse.Namespace) -> list[Row]:
    """Run all kinds with equal workers and with a slowed one, and predict each."""
    # Without variation and alone, a worker's gaps between computing are the all-reduce, or the server's service.
    even = run("Synchronous", options.workers, 1.0, 0.0, options)
    alone = run("Asynchronous", 1, 1.0, 0.0, options)
    reduce_s, service_s = (max(1e-6, each.step_s - fmean(each.compute_s)) for each in (even, alone))
    print(
        f"an all-reduce of {options.workers} ranks takes {1e3 * reduce_s:.1f} ms, an update by the server "
        f"{1e3 * service_s:.1f} ms",
        flush=True,
    )
    found = []
    for factor in (1.0, options.slow):
        for kind in KINDS:
            measured = run(kind, options.workers, factor, options.variation, options)
            found.append(predicted(kind, factor, measured, reduce_s, service_s, options))
    return found


def predicted(
    kind: Kind, slow_factor: float, measured: Measured, reduce_s: float, service_s: float, options: argparse.Namespace
) -> Row:
    """Return a run with its prediction from the computing times of its workers, of which the first may be slowed.

    ``reduce_s``: seconds of an all-reduce. ``service_s``: seconds of the server for an update.
    """
    thinks, n = measured.compute_s, len(measured.compute_s)
    think_s, slowed = fmean(thinks[1:]), slow_factor > 1
    variation = options.variation * options.pause / think_s  # only the pause varies
    slowest_s = max(thinks) if slowed else think_s
    if kind == "Synchronous":
        # A slowed rank is the last in nearly every step, and waits for nobody.
        step_s = reduce_s + (slowest_s if slowed else think_s * straggler_factor(n, variation))
        return Row(kind, slow_factor, measured, step_s, n / step_s, measured.sum_s)
    round_s = n / asynchronous_updates_per_s(n, slowest_s, service_s, variation)
    bounded = kind == "StaleSynchronous" and not slowed
    step_s = round_s + (slowest_s * (stale_factor(n, options.bound, variation) - 1) if bounded else 0.0)
    updates = n / step_s
    if kind == "Asynchronous":
        updates = min(sum(1 / (z + service_s) for z in thinks), 1 / service_s)
    return Row(kind, slow_factor, measured, step_s, updates, max(thinks) + n * service_s)


def show(found: Sequence[Row]) -> None:
    """Print the measured and predicted pace of each run, and the phases of a step."""
    both = "predicted | predicted / measured"
    print(f"\n| kind | slowed rank | step, ms | {both} | updates/s | {both} |")
    print("|---|---|---|---|---|---|---|---|")
    for row in found:
        m, slowed = row.measured, "none" if row.slow_factor == 1 else f"{row.slow_factor:g} times slower"
        pace = f"{1e3 * m.step_s:.1f} | {1e3 * row.predicted_step_s:.1f} | {row.predicted_step_s / m.step_s:.2f}"
        rate = f"{m.updates_per_s:.1f} | {row.predicted_updates_per_s:.1f}"
        ratio = row.predicted_updates_per_s / m.updates_per_s
        print(f"| {row.kind} | {slowed} | {pace} | {rate} | {ratio:.2f} |")
    head = "computing | communication | waiting | input | sum of phases, ms | round, ms | sum / round"
    print(f"\n| kind | slowed rank | {head} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in found:
        m, slowed = row.measured, "none" if row.slow_factor == 1 else f"{row.slow_factor:g} times slower"
        parts = " | ".join(f"{1e3 * m.phases_s[name]:.1f}" for name in PHASES)
        round_s = m.step_s if row.kind == "Synchronous" else len(m.compute_s) / m.updates_per_s
        sums = f"{1e3 * row.phases_s:.1f} | {1e3 * round_s:.1f} | {row.phases_s / round_s:.2f}"
        print(f"| {row.kind} | {slowed} | {parts} | {sums} |")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--pause", type=float, default=0.15, help="seconds of computing in a step (default: %(default)s)"
    )
    parser.add_argument("--variation", type=float, default=0.3, help="standard deviation / mean of a pause")
    parser.add_argument("--slow", type=float, default=2.0, help="factor on the pauses of the slowed rank")
    parser.add_argument("--bound", type=int, default=2, help="staleness bound in steps")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--width", type=int, default=2048, help="hidden units of the model, which has 75 times as many parameters"
    )
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds for each run")
    parser.add_argument("--json", type=Path, help="file for all rows")
    options = parser.parse_args(arguments)
    if not (2 <= options.workers <= 16 and options.steps >= 4 * WARM and options.bound >= 1 and options.slow > 1):
        parser.error(
            f"found --workers {options.workers}, --steps {options.steps}, --bound {options.bound}, --slow "
            f"{options.slow:g}; expected 2 to 16 workers, {4 * WARM} steps or more, a bound of 1 or more, and a factor "
            "above 1"
        )
    if not (0 < options.pause < 10 and 0 < options.variation <= 1):
        parser.error(
            f"found --pause {options.pause:g}, --variation {options.variation:g}; expected a pause above 0 and below "
            "10 s, and a variation above 0 and at most 1"
        )
    print(f"{options.workers} workers, {options.steps} steps; {machine()}", flush=True)
    found = rows(options)
    show(found)
    worst = median(abs(row.predicted_step_s / row.measured.step_s - 1) for row in found)
    print(f"\nmedian error of the step: {100 * worst:.0f} %")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
