"""Measure what the host needs for each call that the observer of scripts counts, on this machine.

    python -m benchmarks.perfmodel.host_calls [--rounds 5] [--json FILE]

Small training programs (``programs``) run on one core. Their calls are counted as those of a script in a pod are
(``dltrain.observation.host_counting``), and the CPU time of their steps is measured in turns. The seconds of a call of
each kind are the maximum a posteriori estimate, as are the factors of the hardware probe. They are divided by the
factor of the host that the hardware probe measures before and after (``TimeFactors.host``), so that
``structure.CALL_S`` are those of the catalogue's core. The error of each program is that of constants which were fitted
without it. CPU times exclude other processes, so that the machine need not be idle, but caches and the units of a core
are shared with them: repeat on an idle one.
"""

import argparse
import json
import time
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmarks.lib.figures import machine
from benchmarks.perfmodel.first_prediction import probed
from benchmarks.perfmodel.host_calls.loop import Step
from benchmarks.perfmodel.host_calls.programs import PROGRAMS
from numpy.typing import NDArray

from dljob.calibrate.hardware import map_estimate
from dljob.cluster.hardware import KEY
from dljob.perf.workload.structure import CALL_S
from dltrain.observation.host_counting import FunctionCounts, host_calls, operator_counts

WARM_UP = 5
TURN_S = 0.2
"""CPU seconds of a program in each round."""
ASSUMED_S = {
    "updates": 1e-4,
    "functions": 1e-7,
    "different": 1e-6,
    "views": 1e-6,
    "operators": 2.5e-6,
    "products": 6e-6,
    "convolutions": 1e-4,
    "messages": 1e-4,
    "distributed": 1e-5,
    "random": 5e-9,
}
"""Seconds of a call before the measurement, in orders of magnitude. The programs differ too little in the mixture of
their calls to measure each kind by itself."""
PRIOR, NOISE = 0.5, 0.2
"""Standard deviations of the logarithms of these seconds, and of log(measured / fitted) of a program."""
UPDATES = {"two optimizers": 2}
"""Program → updates of its step, if not 1."""


def counted(step: Step, updates: int) -> dict[str, int]:
    """Return the calls of a step, from two steps as in the observer."""
    for _ in range(WARM_UP):
        step()
    functions = FunctionCounts()
    step()
    calls = functions.end()
    operators = operator_counts()
    step()
    operators.end()
    found = host_calls(calls, operators.counts, updates)
    if found is None:
        raise SystemExit("the calls of a program were not counted; run without a debugger or a profiler")
    return found


def cpu_s(step: Step) -> float:
    """Return the lower quartile of the CPU seconds of some steps."""
    times: list[float] = []
    for _ in range(WARM_UP):
        step()
    while sum(times) < TURN_S:
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    return sorted(times)[len(times) // 4]


def fitted(rows: list[dict[str, Any]]) -> NDArray[np.float64]:
    """Return the most probable seconds of each kind of call, starting from ``ASSUMED_S``."""
    counts = np.array([[row["calls"][kind] for kind in CALL_S] for row in rows], float)
    assumed, log_s = np.array([ASSUMED_S[kind] for kind in CALL_S]), np.log([row["s"] for row in rows])
    logs = map_estimate(
        lambda logs: np.asarray(np.log(counts @ (assumed * np.exp(logs)))), log_s, np.full(len(assumed), PRIOR), NOISE
    )
    return np.asarray(assumed * np.exp(logs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="Number of rounds (default %(default)s)")
    parser.add_argument("--json", type=Path, help="File for all measurements")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = {name: make() for name, make in PROGRAMS.items()}
    hosts = [_host_factor()]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(cpu_s(step))
    hosts.append(_host_factor())
    rows: list[dict[str, Any]] = [
        {"program": name, "s": median(times[name]), "calls": counted(step, UPDATES.get(name, 1))}
        for name, step in steps.items()
    ]
    host = exp(sum(map(log, hosts)) / len(hosts))
    print(f"factor of the host: {', '.join(f'{each:.2f}' for each in hosts)}; {machine()}")
    print(f"| program | {' | '.join(CALL_S)} | CPU time, us | fitted without it | CALL_S |")
    print("|---" * (len(CALL_S) + 4) + "|")
    errors: dict[str, list[float]] = {"fitted without it": [], "CALL_S": []}
    for i, row in enumerate(rows):
        seconds = fitted(rows[:i] + rows[i + 1 :])
        counts = [row["calls"][kind] for kind in CALL_S]
        ratios = float(counts @ seconds) / row["s"], host * float(counts @ np.array(list(CALL_S.values()))) / row["s"]
        for found, ratio in zip(errors.values(), ratios, strict=True):
            found.append(abs(log(ratio)))
        cells = [*map(str, counts), f"{1e6 * row['s']:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]
        print(f"| {row['program']} | {' | '.join(cells)} |")
    for name, found in errors.items():
        within = sum(each <= log(1.25) for each in found)
        print(f"{name}: median error {100 * (exp(median(found)) - 1):.0f} %, {within} of {len(found)} within 25 %")
    seconds = fitted(rows) / host
    print("CALL_S:", {kind: float(f"{each:.3g}") for kind, each in zip(CALL_S, seconds, strict=True)})
    if options.json:
        document = {"machine": machine(), "host": hosts, "rows": rows, "rounds": times}
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


def _host_factor() -> float:
    hardware = probed()[0][KEY, "cpu"].hardware
    if hardware is None:
        raise SystemExit("the hardware probe measured nothing; look at its output")
    return hardware.factors.host


if __name__ == "__main__":
    main()
