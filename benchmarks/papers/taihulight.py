"""Reproduce the comparison of a layered parameter server with a ring (Caffe on the Sunway TaihuLight, 2020).

    python -m benchmarks.papers.taihulight [--ranks 2 4 8] [--rate MB/s] [--scale 16] [--rounds 3] [--html FILE]
        [--transport shaped|memory]

The ranks exchange the gradients of AlexNet, GoogLeNet and ResNet-50 in the layouts of Caffe (``gradient_layouts``),
with every tensor's size divided by ``--scale``. They do not compute. Links are shaped each way (network namespaces;
needs root). This has the volume of full gradients on links of rate x scale, but the latency of a real network,
relative to the volume, is ``--scale`` times larger here.

    server           rank 0 gathers one tensor after another, averages, and broadcasts all parameters (LayeredServer)
    ring             dljob's ring over one contiguous buffer
    ring per tensor  the same ring, once for each tensor
    ring with copies one ring, and each tensor is copied into the buffer and out of it
    Open MPI         ``MPI_Allreduce`` with Open MPI's own choice of an algorithm, over the contiguous buffer
    Open MPI's ring  ``MPI_Allreduce``, for which Open MPI is forced to use its ring

All ways take turns in the same processes. Times are medians over rounds of the slowest rank's time. Predictions use the
measured latency and the nominal rate (``perf.step.communication``).

More ranks than processors. One machine does the work of all ranks and all links, so a comparison is valid only where
the links take the time, not the processors. Without ``--rate``, all links together therefore have the same rate for any
number of ranks (``ALL_LINKS_MBps``). A second run on unlimited links shows how long the processors need for the same
exchange. If that is more than half of the time on shaped links, the table says ``processors``, and that row says little
about a network. The table also has the part of all processors that the ranks use, and that the whole machine uses,
with other programs. Ranks that wait for Open MPI's own all-reduces poll and so use a processor, which they yield to
others. dljob's ranks sleep.

``--html`` writes a page with plots of all of this, and of the model on 2 to 512 nodes at 14 GB/s.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib import namespaces
from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH, mpirun
from benchmarks.papers.taihulight_page import Rows, page, show
from benchmarks.papers.taihulight_ranks import COPIED, OPEN_MPI, SCATTERED, SERVER, WAYS
from benchmarks.perfmodel.gradient_layouts import LAYOUTS

from dljob.perf.step.communication import Link, allreduce_s, ring_s
from dljob.perf.workload.workload import REAL_NBYTES

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
REDUCE_BPS = COPY_BPS = 5e9
"""Bytes per second that a rank adds or copies (the planner's assumption for CPUs)."""
MEMORY_BPS = 2e9
"""Assumed bandwidth between ranks on one machine, for the transport memory."""
ALL_LINKS_MBps = 50.0
"""Rate of all shaped links together, in MB/s each way, which two processors carry with time to spare."""
OVERSUBSCRIBED = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
"""Environment of ranks that share processors: a rank that polls yields its processor, as in the trainer's pods."""


def scaled(scale: int) -> dict[str, list[int]]:
    """Return the layouts with each tensor's number of elements divided by ``scale``, at least 1."""
    return {name: [max(1, size // scale) for size in sizes] for name, sizes in LAYOUTS.items()}


def rate_of(ranks: int, rate_MBps: float | None) -> float:
    """Return the rate of a link in MB/s: ``rate_MBps``, or by default its part of ``ALL_LINKS_MBps``."""
    return ALL_LINKS_MBps / ranks if rate_MBps is None else rate_MBps


def run(
    ranks: int, layouts: Mapping[str, Sequence[int]], rounds: int, *, shaped: bool, rate_Bps: float | None = None
) -> dict[str, Any]:
    """Run the ranks and return what rank 0 printed.

    ``shaped``: True to run each rank in a namespace of its own, on links of ``rate_Bps`` (None: unlimited). Otherwise,
    the ranks use shared memory.
    """
    env = os.environ | OVERSUBSCRIBED | {"PYTHONPATH": PYTHONPATH}
    with contextlib.ExitStack() as stack:
        if shaped:
            name = stack.enter_context(namespaces.machines(ranks, rate_Bps))
            command = namespaces.mpirun_on(name, ranks, ("PYTHONPATH", *OVERSUBSCRIBED), MPIRUN)
        else:
            command = mpirun(ranks)
        settings = json.dumps({"layouts": dict(layouts), "rounds": rounds})
        worker = [sys.executable, "-m", "benchmarks.papers.taihulight_ranks", settings]
        done = subprocess.run([*command, *worker], env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def predicted(way: str, sizes: Sequence[int], ranks: int, link: Link) -> float:
    """Return the predicted seconds of ``way`` for gradients of ``sizes`` elements."""
    nbytes = float(REAL_NBYTES * sum(sizes))
    if way == SERVER:
        return float(allreduce_s("LayeredServer", nbytes, float(ranks), link, tensors=len(sizes)))
    if way == SCATTERED:
        return sum(float(ring_s(REAL_NBYTES * size, ranks, link)) for size in sizes)
    if way == OPEN_MPI:
        return float(allreduce_s("MPI", nbytes, float(ranks), link))
    return float(ring_s(nbytes, ranks, link)) + (2 * nbytes / COPY_BPS if way == COPIED else 0.0)


def rows_of(
    ranks: int, link: Link, found: Mapping[str, Any], free: Mapping[str, Any] | None, layouts: Mapping[str, Any]
) -> Rows:
    """Return measured and predicted seconds by model and way, as one row for each.

    ``found``: what the ranks measured on ``link``. ``free``: the same on unlimited links; None if it was not measured.
    """
    rows, processors = Rows(), os.cpu_count() or 1
    for model, by_way in found["found"].items():
        for way in WAYS:
            seconds = by_way[way]["seconds"]
            ranks_load, machine_load = (
                sum(by_way[way][name]) / (processors * sum(seconds)) for name in ("ranks_cpu_s", "machine_cpu_s")
            )
            row = {
                "model": model, "ranks": ranks, "way": way, "measured_s": median(seconds), "fastest_s": min(seconds),
                "slowest_s": max(seconds), "predicted_s": predicted(way, layouts[model], ranks, link),
                "latency_s": link.latency_s, "rate_Bps": link.bandwidth_Bps,
                "free_s": median(free["found"][model][way]["seconds"]) if free else None,
                "ranks_load": ranks_load, "machine_load": machine_load,
            }  # fmt: skip
            rows.append(row)
    return rows


def measured(ranks: int, options: argparse.Namespace) -> Rows:
    """Run ``ranks`` ranks on shaped links and on unlimited ones, or through memory, and return their rows."""
    layouts, shaped = scaled(options.scale), options.transport == "shaped"
    rate_Bps = 1e6 * rate_of(ranks, options.rate) if shaped else None
    found = run(ranks, layouts, options.rounds, shaped=shaped, rate_Bps=rate_Bps)
    free = run(ranks, layouts, options.rounds, shaped=True) if shaped else None
    link = Link(found["link"]["latency_s"], rate_Bps or MEMORY_BPS, REDUCE_BPS, "measured latency")
    return rows_of(ranks, link, found, free, layouts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rate", type=float, help=f"MB/s of a shaped link (default: {ALL_LINKS_MBps:g} / ranks)")
    parser.add_argument("--scale", type=int, default=16, help="divisor of each tensor's size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", choices=("shaped", "memory"), default="shaped")
    parser.add_argument("--html", type=Path, help="file for the page with plots")
    parser.add_argument("--json", type=Path, help="file for all rows")
    options = parser.parse_args(arguments)
    if not 2 <= min(options.ranks) <= max(options.ranks) <= 8 or min(options.scale, options.rounds) < 1:
        parser.error(
            f"found --ranks {options.ranks}, --scale {options.scale}, --rounds {options.rounds}; expected 2 to 8 "
            "ranks, and 1 or more of the others"
        )
    if options.rate is not None and not 0 < options.rate < inf:
        parser.error(f"--rate: found {options.rate:g}; expected a number of MB/s above 0")
    shaped = options.transport == "shaped"
    if shaped and (reason := namespaces.available()) is not None:
        parser.error(f"{reason}; run as root, or with --transport memory")
    counts = sorted(set(options.ranks))
    rates = ", ".join(f"{rate_of(n, options.rate):g} MB/s with {n} ranks" for n in counts)
    link = f"links of {rates}" if shaped else "one machine's memory, which is no network: compare messages only"
    about = f"{link}; sizes / {options.scale}, {options.rounds} rounds; {machine()}"
    print(about, flush=True)
    rows: Rows = []
    for ranks in counts:
        rows += measured(ranks, options)
        if options.json:
            options.json.write_text(json.dumps({"about": about, "rows": rows}))
    show(rows)
    if options.html:
        options.html.write_text(page(rows, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
