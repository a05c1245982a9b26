"""Reproduce the comparison of a layered parameter server with a ring (Caffe on the Sunway TaihuLight, 2020).

    python -m benchmarks.papers.taihulight [--ranks 2 4 8] [--rate 25] [--scale 16] [--rounds 3] [--html FILE]
        [--transport shaped|memory]

The ranks exchange the gradients of AlexNet, GoogLeNet and ResNet-50 in the layouts of Caffe (``gradient_layouts``),
with every tensor's size divided by ``--scale``. They do not compute. Links have ``--rate`` MB/s each way (network
namespaces; needs root). This has the volume of full gradients on links of rate x scale, but the latency of a real
network, relative to the volume, is ``--scale`` times larger here.

    server           rank 0 gathers one tensor after another, averages, and broadcasts all parameters (LayeredServer)
    ring             dljob's ring over one contiguous buffer
    ring per tensor  the same ring, once for each tensor
    ring with copies one ring, and each tensor is copied into the buffer and out of it
    Open MPI         ``MPI_Allreduce`` with Open MPI's own choice of an algorithm, over the contiguous buffer

All ways take turns in the same processes. Times are medians over rounds of the slowest rank's time. Predictions use the
measured latency and the nominal rate (``perf.step.communication``). ``--html`` writes a page with plots of both, and of
the model on 2 to 512 nodes at 14 GB/s.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib import namespaces
from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH
from benchmarks.papers.taihulight_ranks import COPIED, OPEN_MPI, RING, SCATTERED, SERVER, WAYS
from benchmarks.perfmodel.gradient_layouts import LAYOUTS
from benchmarks.perfmodel.literature import DEFAULT_OVER_RING, NODES, PUBLISHED, Constants, search, times

from dljob.perf.step.communication import Link, allreduce_s, ring_s
from dljob.perf.workload.workload import REAL_NBYTES
from dltrain.record.run_report import plots
from dltrain.record.run_report.page import html_page

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
REDUCE_BPS = COPY_BPS = 5e9
"""Bytes per second that a rank adds or copies (the planner's assumption for CPUs)."""
MEMORY_BPS = 2e9
"""Assumed bandwidth between ranks on one machine, for the transport memory."""
Rows = list[dict[str, Any]]


def scaled(scale: int) -> dict[str, list[int]]:
    """Return the layouts with each tensor's number of elements divided by ``scale``, at least 1."""
    return {name: [max(1, size // scale) for size in sizes] for name, sizes in LAYOUTS.items()}


def run(ranks: int, rate_Bps: float | None, layouts: Mapping[str, Sequence[int]], rounds: int) -> dict[str, Any]:
    """Run the ranks and return what rank 0 printed. ``rate_Bps``: None runs them on one machine, by shared memory."""
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        if rate_Bps is None:
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            command = [str(MPIRUN), *root, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks)]
        else:
            name = stack.enter_context(namespaces.machines(ranks, rate_Bps))
            command = namespaces.mpirun_on(name, ranks, ("PYTHONPATH", "OMP_NUM_THREADS"), MPIRUN)
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


def rows_of(ranks: int, rate_Bps: float | None, found: Mapping[str, Any], layouts: Mapping[str, Sequence[int]]) -> Rows:
    """Return measured and predicted seconds by model and way, as one row for each."""
    link = Link(found["link"]["latency_s"], rate_Bps or MEMORY_BPS, REDUCE_BPS, "measured latency")
    return [
        {
            "model": model, "ranks": ranks, "way": way, "measured_s": median(seconds[way]),
            "fastest_s": min(seconds[way]), "slowest_s": max(seconds[way]),
            "predicted_s": predicted(way, layouts[model], ranks, link), "latency_s": link.latency_s,
        }
        for model, seconds in found["seconds"].items() for way in WAYS
    ]  # fmt: skip


def ratio(rows: Rows, model: str, ranks: int, over: str, under: str, field: str = "measured_s") -> float:
    """Return the ratio of two ways' seconds for one model and number of ranks."""
    by_way = {row["way"]: row[field] for row in rows if row["model"] == model and row["ranks"] == ranks}
    return float(by_way[over] / by_way[under])


COMPARISONS = ((SERVER, RING), (SCATTERED, RING), (COPIED, RING), (OPEN_MPI, RING))


def show(rows: Rows) -> None:
    """Print measured and predicted seconds, and the ratios of the paper's comparisons."""
    print("\n| model | ranks | way | measured, s (range) | predicted, s | measured / predicted |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        spread = f"{row['measured_s']:.3f} ({row['fastest_s']:.3f}-{row['slowest_s']:.3f})"
        print(
            f"| {row['model']} | {row['ranks']} | {row['way']} | {spread} | {row['predicted_s']:.3f} | "
            f"{row['measured_s'] / row['predicted_s']:.2f} |"
        )
    print("\n| model | ranks | comparison | measured | predicted |")
    print("|---|---|---|---|---|")
    for model, ranks in dict.fromkeys((row["model"], row["ranks"]) for row in rows):
        for over, under in COMPARISONS:
            both = (ratio(rows, model, ranks, over, under, field) for field in ("measured_s", "predicted_s"))
            print(f"| {model} | {ranks} | {over} / {under} | {' | '.join(f'{value:.2f}' for value in both)} |")


def page(rows: Rows, about: str) -> str:
    """Return an HTML page with plots like the paper's figures: measured here, and by the model on 2 to 512 nodes."""
    body = ["<h1>Layered parameter server against ring</h1>", f"<p>{plots.clean(about)}</p>"]
    for model in LAYOUTS:
        own = [row for row in rows if row["model"] == model]
        curves = [
            plots.Curve(
                f"{way}, {field.removesuffix('_s')}",
                [(row["ranks"], row[field]) for row in own if row["way"] == way],
                dashed=field == "predicted_s",
            )
            for way in (SERVER, RING, OPEN_MPI)
            for field in ("measured_s", "predicted_s")
        ]
        body.append(plots.lines(f"{model}: measured here", "ranks", "s", curves, zero=True))
    stated = Constants()
    for model, sizes in LAYOUTS.items():
        at = PUBLISHED[model]
        names = {"as stated (14 GB/s, 1 us)": stated, "best single set of constants": search("Serial")}
        curves = [
            plots.Curve(name, [(float(k), times(sizes, n, given).ratio) for k, n in enumerate(NODES, start=1)])
            for name, given in names.items()
        ]
        text = f"{model}: server / ring on 2^k nodes by the model; published {at.ratio:g} on {at.nodes} nodes"
        where = plots.Mark(float(at.nodes.bit_length() - 1), f"published: {at.ratio:g}")
        body.append(plots.lines(text, "k", "ratio", curves, [where], zero=True))
    low, high = DEFAULT_OVER_RING
    body.append(
        f"<p>Published for MPI_Allreduce / ring on 512 nodes: {low} to {high}. All figures and their differences: "
        "docs/papers.md.</p>"
    )
    return html_page("Layered parameter server against ring", body)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rate", type=float, default=25.0, help="MB/s of a shaped link (default: %(default)s)")
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
    if not 0 < options.rate < float("inf"):
        parser.error(f"--rate: found {options.rate:g}; expected a number of MB/s above 0")
    shaped = options.transport == "shaped"
    if shaped and (reason := namespaces.available()) is not None:
        parser.error(f"{reason}; run as root, or with --transport memory")
    layouts, rate_Bps = scaled(options.scale), 1e6 * options.rate if shaped else None
    link = f"links of {options.rate:g} MB/s" if shaped else "one machine's memory"
    about = f"{link}, sizes / {options.scale}, {options.rounds} rounds; {machine()}"
    print(about, flush=True)
    rows: Rows = []
    for ranks in sorted(set(options.ranks)):
        rows += rows_of(ranks, rate_Bps, run(ranks, rate_Bps, layouts, options.rounds), layouts)
    show(rows)
    if options.html:
        options.html.write_text(page(rows, about))
    if options.json:
        options.json.write_text(json.dumps({"about": about, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
