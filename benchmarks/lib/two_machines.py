"""Run a benchmark's two ranks on this machine, or on two machines (network namespaces) with a shaped link."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib import namespaces
from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH, mpirun

RANKS = 2
PLACES = ("memory", "shaped")
VARIABLES = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")


def options(description: str | None, models: Collection[str]) -> argparse.Namespace:
    """Parse the options of such a benchmark. ``where`` has the places, and ``models`` the models to measure."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="*", help="memory, shaped (default: both)")
    parser.add_argument("--model", choices=list(models), action="append", dest="models", help="default: all of them")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rate", type=float, default=100.0, help="MB/s of a shaped link (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the raw times")
    found = parser.parse_args()
    found.where, found.models = found.where or list(PLACES), found.models or list(models)
    if unknown := set(found.where) - set(PLACES):
        parser.error(f"found {', '.join(sorted(unknown))}; expected memory, shaped")
    if "shaped" in found.where and (reason := namespaces.available()) is not None:
        parser.error(f"{reason}; run the case memory only")
    return found


def results(
    module: str, given: argparse.Namespace, header: str
) -> Iterator[tuple[str, str, float | None, dict[str, Any]]]:
    """Print ``header``, and yield (model, place, rate of the link, what rank 0 printed) of each run of ``module``.

    ``given``: the options. Write all results to their file at the end.
    """
    host, found = machine(), []
    print(f"{given.rounds} rounds, {RANKS} ranks x 1 thread; links of {given.rate:g} MB/s; {host}\n\n{header}")
    for model in given.models:
        for place in given.where:
            rate_Bps = given.rate * 1e6 if place == "shaped" else None
            printed = run(module, rate_Bps, model=model, rounds=given.rounds)
            yield model, place, rate_Bps, printed
            found.append({"model": model, "where": place, **printed})
    if given.json:
        given.json.write_text(json.dumps({"machine": host, "rate_MBps": given.rate, "results": found}))


def run(module: str, rate_Bps: float | None, **settings: Any) -> dict[str, Any]:
    """Run ``module`` on each rank, and return the JSON line that rank 0 printed.

    ``rate_Bps``: rate of the link in bytes per second; None: both ranks run on this machine. The argument of the module
    is JSON with ``settings`` and ``host``, the address of rank 0.
    """
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        host, command = "127.0.0.1", mpirun(RANKS)
        if rate_Bps is not None:
            host, env["GLOO_SOCKET_IFNAME"] = namespaces.address(0), namespaces.INTERFACE
            name = stack.enter_context(namespaces.machines(RANKS, rate_Bps))
            command = namespaces.mpirun_on(name, RANKS, VARIABLES, Path(sys.prefix) / "bin" / "mpirun")
        worker = [sys.executable, "-m", module, json.dumps({**settings, "host": host})]
        done = subprocess.run([*command, *worker], env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found
