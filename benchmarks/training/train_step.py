"""Compare a training step of dljob with PyTorch's DDP over gloo on 2 ranks.

    python -m benchmarks.training.train_step

    memory   both ranks on this machine
    shaped   one rank per machine (network namespace), links of --rate MB/s each way; needs root

Name a case to run only that one. Models are the built-in ResNet-18 on images of 32 x 32 (8 per rank) and the small GPT
on 128 tokens (4 sequences per rank), with one thread per rank and the same optimizer. In every round dljob, plain DDP
and training without communication take turns in the same processes. dljob runs as a user's script with
``dltrain.init``, and once more with ``collective: DDP``, which uses DDP's reducer; plain DDP reads slices of memory.
Times are medians over rounds of the slowest rank's step. Ratios are medians of the rounds' ratios with their 95 %
interval. Exposed communication is the step time minus that without communication. The link time is the time to send the
gradients at 1448 of 1538 bytes, whatever the algorithm. If it dominates the step, no implementation can be much faster
than another.

Thresholds: the step of dljob takes at most 0.95 of plain DDP's, and with ``collective: DDP`` at most 1.05. A threshold
is missed if the whole interval is above it.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.lib import namespaces
from benchmarks.lib.figures import at_most, machine, ratio
from benchmarks.lib.local_ranks import PYTHONPATH
from benchmarks.training.ranks.train_step import ALONE, DDP, HOOKED, MODELS, OURS

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
RANKS = 2
VARIABLES = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")


def run(model: str, rate_Bps: float | None, rounds: int) -> dict[str, Any]:
    """Run the ranks on one machine, or with a rate on two, and return the result that rank 0 printed."""
    env = os.environ | {
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
    }
    with contextlib.ExitStack() as stack:
        if rate_Bps is None:
            host = "127.0.0.1"
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            command = [str(MPIRUN), *root, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(RANKS)]
        else:
            host = namespaces.address(0)
            env["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
            name = stack.enter_context(namespaces.machines(RANKS, rate_Bps))
            command = namespaces.mpirun_on(name, RANKS, VARIABLES, MPIRUN)
        settings = json.dumps({"model": model, "rounds": rounds, "host": host})
        worker = [sys.executable, "-m", "benchmarks.training.ranks.train_step", settings]
        done = subprocess.run([*command, *worker], env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def link_s(parameters: int, rate_Bps: float) -> float:
    """Return the link time: each of two ranks sends as many bytes as it has gradients, half of them already summed."""
    return 4 * parameters / (rate_Bps * 1448 / 1538)


def show(model: str, where: str, found: dict[str, Any], rate_Bps: float | None) -> None:
    steps = {name: np.array([spent for spent, _ in times]) for name, times in found["seconds"].items()}
    waited = np.array([exposed for _, exposed in found["seconds"][OURS]])
    ms = {name: 1e3 * float(np.median(times)) for name, times in steps.items()}
    exposed = [1e3 * float(np.median(steps[name] - steps[ALONE])) for name in (OURS, HOOKED, DDP)]
    link = link_s(found["parameters"], rate_Bps) if rate_Bps is not None else 0.0
    figures = [ms[OURS], ms[HOOKED], ms[DDP], ms[ALONE], 1e3 * link, *exposed, 1e3 * float(np.median(waited))]
    size = f"{4e-6 * found['parameters']:.1f} MB"
    print(f"| {model}, {size} | {where} | {' | '.join(f'{figure:.1f}' for figure in figures)} | ", end="")
    print(f"{at_most(ratio(steps[OURS], steps[DDP]), 0.95)} | ", end="")
    print(f"{at_most(ratio(steps[HOOKED], steps[DDP]), 1.05)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="*", help="memory, shaped (default: both)")
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all of them")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rate", type=float, default=100.0, help="MB/s of a shaped link (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the raw times")
    options = parser.parse_args()
    where = options.where or ["memory", "shaped"]
    if unknown := set(where) - {"memory", "shaped"}:
        parser.error(f"found {', '.join(sorted(unknown))}; expected memory, shaped")
    if "shaped" in where and (reason := namespaces.available()) is not None:
        parser.error(f"{reason}; run the case memory only")
    host = machine()
    print(f"{options.rounds} rounds, {RANKS} ranks x 1 thread; links of {options.rate:g} MB/s; {host}\n")
    columns = (
        "| gradients | where | dljob, ms | dljob with DDP, ms | plain DDP, ms | without communication, ms "
        "| link time, ms "
    )
    print(
        columns
        + "| exposed, dljob, ms | exposed, dljob with DDP, ms | exposed, plain DDP, ms "
        + "| waited after backward, dljob, ms | dljob / plain DDP | dljob with DDP / plain DDP |\n|"
        + "---|" * 13
    )
    results = []
    for model in options.model or MODELS:
        for place in where:
            rate_Bps = options.rate * 1e6 if place == "shaped" else None
            found = run(model, rate_Bps, options.rounds)
            show(model, place, found, rate_Bps)
            results.append({"model": model, "where": place, **found})
    if options.json:
        options.json.write_text(json.dumps({"machine": host, "rate_MBps": options.rate, "results": results}))


if __name__ == "__main__":
    main()
