"""Compare a training step of strategy Sharded with PyTorch's ``fully_shard`` and DDP over gloo on 2 ranks.

    python -m benchmarks.training.sharded_step [--rounds 15] [--model gpt-mini]

    memory   both ranks on this machine
    shaped   one rank per machine (network namespace), links of --rate MB/s each way; needs root

Name a case to run only that one. Models are the built-in small GPT on 128 tokens (4 sequences per rank) and ResNet-18
on images of 32 x 32 (8 per rank), with one thread per rank and the same optimizer. In every round, the three take
turns in the same processes: a user's script with ``dltrain.init(strategy="Sharded")``; a plain loop whose model was
sharded by ``fully_shard``, with the same units; and a plain loop with ``DistributedDataParallel``, which stores
everything on each rank. The plain loops read slices of memory. Times are medians over the rounds of the slowest rank's
step. Ratios are medians of the rounds' ratios with their 95 % interval.

Threshold: the step of dljob takes at most 1.05 times that of plain ``fully_shard``. It also weights the gradients of
uneven local batches, reads by its loader, and shares the loss of all ranks. The threshold is missed if the whole
interval is above it.
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
from benchmarks.lib.figures import at_most, machine, ratio, text
from benchmarks.lib.local_ranks import PYTHONPATH, mpirun
from benchmarks.training.ranks.sharded_step import DDP, FSDP, MODELS, OURS

RANKS, BAR = 2, 1.05
VARIABLES = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")


def run(model: str, rate_Bps: float | None, rounds: int) -> dict[str, Any]:
    """Run the ranks on one machine, or with a rate on two, and return the result that rank 0 printed."""
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        command = mpirun(RANKS)
        if rate_Bps is not None:
            env["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
            name = stack.enter_context(namespaces.machines(RANKS, rate_Bps))
            command = namespaces.mpirun_on(name, RANKS, VARIABLES, Path(sys.prefix) / "bin" / "mpirun")
        settings = json.dumps({"model": model, "rounds": rounds})
        worker = [sys.executable, "-m", "benchmarks.training.ranks.sharded_step", settings]
        done = subprocess.run([*command, *worker], env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def show(model: str, where: str, found: dict[str, Any]) -> None:
    steps = {name: np.array(times) for name, times in found["seconds"].items()}
    ms = [f"{1e3 * float(np.median(steps[name])):.1f}" for name in (OURS, FSDP, DDP)]
    mb = [f"{1e-6 * found['stored_nbytes'][name]:.1f}" for name in (OURS, FSDP, DDP)]
    print(f"| {model} | {where} | {' | '.join(ms)} | {' | '.join(mb)} | ", end="")
    print(f"{at_most(ratio(steps[OURS], steps[FSDP]), BAR)} | {text(ratio(steps[OURS], steps[DDP]))} |", flush=True)


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
    print(
        "| model | where | dljob, ms | fully_shard, ms | DDP, ms | stored by dljob, MB | by fully_shard, MB "
        "| by DDP, MB | dljob / fully_shard | dljob / DDP |\n|" + "---|" * 10
    )
    results = []
    for model in options.model or MODELS:
        for place in where:
            found = run(model, options.rate * 1e6 if place == "shaped" else None, options.rounds)
            show(model, place, found)
            results.append({"model": model, "where": place, **found})
    if options.json:
        options.json.write_text(json.dumps({"machine": host, "rate_MBps": options.rate, "results": results}))


if __name__ == "__main__":
    main()
