"""Measure the recovery time of a job with three pods after a fault, in namespaces of one machine. Needs root.

    python -m benchmarks.training.faults [--rounds 5]

Every round injects each fault into a new job with real agents and ranks. The output has the median and the maximum of:
``noticed_s``, the time until the report mentions the fault; ``trains_s``, the time until the report says that the ranks
train again; ``shrink_s``, the time from when the ranks notice the loss until the smaller process group is ready;
``agree_us``, the duration of the agreement in a step before the fault.
"""

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from dlcontract import ModelRef, RunPhase
from support.trainer.pods import KILL, Job, job, process, rank_process, steps_in_memory

FAULTS: dict[str, Callable[[Job], None]] = {
    "killed rank": lambda made: os.kill(rank_process(made.pods[2]), KILL),
    "killed rank 0": lambda made: os.kill(rank_process(made.pods[0]), KILL),
    "killed mpirun": lambda made: os.kill(process(made.pods[0], "prterun"), KILL),
    "killed daemon": lambda made: os.kill(process(made.pods[1], "prted"), KILL),
    "lost pod": lambda made: made.pods[1].kill(),
    "lost first pod": lambda made: made.pods[0].kill(),
    "cut link": lambda made: made.pods[1].link("down"),
}


def strike(fault: Callable[[Job], None]) -> dict[str, float]:
    """Run one job, inject one fault and return the seconds of each part."""
    with job(3) as made:
        made.start(made.plan(model=ModelRef(name="mlp"), steps=100_000, min_ranks=2))
        made.wait(lambda: all(steps_in_memory(pod) for pod in made.pods), 120)
        before = made.until(lambda r: r.phase is RunPhase.RUNNING and all(m.agree_s for m in r.ranks), 30)
        fault(made)
        began = time.monotonic()
        made.until(lambda r: r.restarts, 60)
        noticed_s = time.monotonic() - began
        made.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING and r.world_size > 0, 60)
        trains_s = time.monotonic() - began
        shrinks = [
            float(text) for pod in made.pods for text in re.findall(r"continue from .* after ([\d.]+) s", pod.text())
        ]
        agreed_s = statistics.median(m.agree_s for m in before.ranks)
        return {
            "noticed_s": noticed_s,
            "trains_s": trains_s,
            "shrink_s": max(shrinks, default=0.0),
            "agree_us": 1e6 * agreed_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    results: dict[str, list[dict[str, float]]] = {name: [] for name in FAULTS}
    for number in range(rounds):
        for name, fault in FAULTS.items():
            results[name].append(strike(fault))
            print(f"{number + 1}/{rounds} {name}: {json.dumps(results[name][-1])}", file=sys.stderr, flush=True)
    result = {
        name: {
            key: [round(pick([row[key] for row in rows]), 4) for pick in (statistics.median, max)] for key in rows[0]
        }
        for name, rows in results.items()
    }
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "load": os.getloadavg()[0], "rounds": rounds}
    print(json.dumps(machine | {"median_and_worst": result}, indent=1))


if __name__ == "__main__":
    main()
