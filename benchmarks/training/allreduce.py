"""Compare the trainer's all-reduce (``auto``) with Open MPI's and gloo's, by size and transport.

    python -m benchmarks.training.allreduce

    memory   2 ranks on one machine
    tcp      2 ranks on two machines (network namespaces) with an unlimited link; needs root
    shaped   2, 4 and 8 ranks on one machine each, links of --rate MB/s each way; needs root
    servers  a synchronous parameter server against the ring, over the number of ranks, on shaped links; needs root

Name cases to run only those. All candidates take turns in the same processes in every round, so that noise affects
all of them. Times are medians over rounds of the slowest rank's time. Ratios are medians of the rounds' ratios with
their 95 % interval. A threshold is missed if the whole interval is on its wrong side. MB/s are bytes of the buffer per
second. The bound of a ring is the rate of the link times n / (2 (n - 1)).

Thresholds: auto is at least 0.95 of the best other candidate at every size, and 1.0 on the geometric mean over sizes.
On shaped links it is at least 0.90 of the bound with 2 ranks and 0.85 with 4.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.lib import namespaces
from benchmarks.lib.figures import Times, at_least, geometric_mean, machine, ratio, text
from benchmarks.lib.local_ranks import PYTHONPATH
from benchmarks.training.ranks.allreduce import GLOO, OPEN_MPI, OURS, RING, SEGMENTED, SERVER

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
SMALLEST_NBYTES = 2**16
BOUND_THRESHOLD = {2: 0.90, 4: 0.85}
"""Required fraction of the ring's bound, by number of ranks."""
VARIABLES = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Case:
    transport: str
    ranks: int
    rate_Bps: float | None
    sizes: list[int]

    @property
    def bound_Bps(self) -> float | None:  # noqa: N802 - the unit's own spelling
        """The bound of a ring, whose ranks send 2 (n - 1) / n of the buffer each."""
        return self.rate_Bps * self.ranks / (2 * (self.ranks - 1)) if self.rate_Bps else None


def cases(names: list[str], rate_Bps: float, largest: int, largest_shaped: int) -> list[Case]:
    free, slow = sizes(largest), sizes(min(largest, largest_shaped))
    found = []
    for name in names:
        if name in ("memory", "tcp"):
            found.append(Case(name, 2, None, free))
        elif name == "shaped":
            found += [Case(name, ranks, rate_Bps, slow) for ranks in (2, 4, 8)]
    return found


def sizes(largest: int) -> list[int]:
    return [4**i * SMALLEST_NBYTES for i in range(20) if 4**i * SMALLEST_NBYTES <= largest]


def run(case: Case, rounds: int, candidates: list[str]) -> list[dict[str, Any]]:
    """Run the ranks and return the rows that rank 0 printed."""
    env = os.environ | {
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
    }
    one_machine = case.transport == "memory"
    host = "127.0.0.1" if one_machine else namespaces.address(0)
    settings = {"sizes": case.sizes, "rounds": rounds, "host": host, "candidates": candidates}
    with contextlib.ExitStack() as stack:
        if one_machine:
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            command = [str(MPIRUN), *root, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(case.ranks)]
        else:
            env["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
            name = stack.enter_context(namespaces.machines(case.ranks, case.rate_Bps))
            command = namespaces.mpirun_on(name, case.ranks, VARIABLES, MPIRUN)
        worker = [sys.executable, "-m", "benchmarks.training.ranks.allreduce", json.dumps(settings)]
        done = subprocess.run([*command, *worker], env=env, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    """Print a table by size and the verdicts."""
    bound = case.bound_Bps
    link = f", {case.rate_Bps / 1e6:.0f} MB/s each way, ring bound {bound / 1e6:.1f} MB/s" if bound else ""  # type: ignore[operator]
    print(f"\n## {case.transport}, {case.ranks} ranks{link}\n")
    seconds = [{name: np.array(times) for name, times in row["seconds"].items()} for row in rows]
    others = [name for name in seconds[0] if name != OURS]
    columns = ["buffer", *(f"{name}, MB/s" for name in (OURS, *others)), "auto / best other", "auto chose"]
    print(f"| {' | '.join([*columns, *(['auto / bound'] if bound else [])])} |")
    print("|" + "---|" * (len(columns) + bool(bound)))
    best: list[tuple[Times, Times]] = []
    verdicts = []
    for row, times in zip(rows, seconds, strict=True):
        nbytes, size = row["nbytes"], f"{row['nbytes'] >> 10} KiB"
        speeds = [f"{nbytes / np.median(times[name]) / 1e6:.4g}" for name in (OURS, *others)]
        other = min(others, key=lambda name: float(np.median(times[name])))
        best.append((times[other], times[OURS]))
        found = ratio(*best[-1])
        cells = [size, *speeds, f"{text(found)} of {other}", ", ".join(row["picked"])]
        if bound:
            cells.append(text(ratio(np.full(len(times[OURS]), nbytes / bound), times[OURS])))
        print(f"| {' | '.join(cells)} |")
        verdicts.append(f"{size}, auto / best other ({other}): {at_least(found, 0.95)}")
    print("\n" + "\n".join(verdicts))
    print(f"geometric mean over sizes: {at_least(geometric_mean(best), 1.0)}")
    if bound and case.ranks in BOUND_THRESHOLD:
        last = seconds[-1][OURS]
        found = ratio(np.full(len(last), case.sizes[-1] / bound), last)
        print(f"{case.sizes[-1] >> 10} KiB, auto / bound: {at_least(found, BOUND_THRESHOLD[case.ranks])}", flush=True)


def servers(rate_Bps: float, rounds: int, plot: Path | None) -> list[dict[str, Any]]:
    """Compare parameter server and ring over the number of ranks. Print a table, and write ``plot`` if given."""
    nbytes = 2**22
    print(
        f"\n## parameter server (1, synchronous) against ring, {nbytes >> 10} KiB, {rate_Bps / 1e6:.0f} MB/s each way\n"
    )
    print("| ranks | ring, s | parameter server, s | ring bound, s | server bound, s | server / ring |")
    print("|---|---|---|---|---|---|")
    found = []
    for ranks in (2, 3, 4, 6, 8):
        (row,) = run(Case("shaped", ranks, rate_Bps, [nbytes]), rounds, [RING, SERVER])
        ring, server = (np.array(row["seconds"][name]) for name in (RING, SERVER))
        # The server's link receives the buffers of all other ranks, then sends as many.
        bounds = [2 * (ranks - 1) / ranks * nbytes / rate_Bps, (ranks - 1) * nbytes / rate_Bps]
        found.append({"ranks": ranks, **row, "bounds": bounds})
        cells = [f"{np.median(ring):.3f}", f"{np.median(server):.3f}", *(f"{bound:.3f}" for bound in bounds)]
        print(f"| {ranks} | {' | '.join(cells)} | {text(ratio(server, ring))} |", flush=True)
    if plot is not None:
        draw(found, plot)
    return found


def draw(found: list[dict[str, Any]], to: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    ranks = [point["ranks"] for point in found]
    for number, (name, color) in enumerate(((RING, "tab:blue"), (SERVER, "tab:orange"))):
        axes.plot(ranks, [np.median(point["seconds"][name]) for point in found], "o-", color=color, label=name)
        axes.plot(ranks, [point["bounds"][number] for point in found], ":", color=color, label=f"{name}, bound")
    axes.set(xlabel="ranks", ylabel="s", ylim=(0, None), title="All-reduce of 4 MiB over shaped links")
    axes.legend()
    figure.savefig(to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    transports = ("memory", "tcp", "shaped", "servers")
    parser.add_argument("what", nargs="*", metavar="|".join(transports), help="default: all of them")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, help="number of ranks for shaped (default: 2, 4 and 8)")
    parser.add_argument("--rate", type=float, default=25.0, help="MB/s of a shaped link (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=2**28, help="bytes")
    parser.add_argument(
        "--largest-shaped", type=int, default=2**24, help="bytes (default: 16 MiB, because links are slow)"
    )
    parser.add_argument("--plot", type=Path, help="file for the plot of servers (needs the extra 'plot')")
    parser.add_argument("--json", type=Path, help="file for the raw times")
    options = parser.parse_args()
    what = options.what or list(transports)
    if unknown := set(what) - set(transports):
        parser.error(f"found {', '.join(sorted(unknown))}; expected some of {', '.join(transports)}")
    if set(what) - {"memory"} and (reason := namespaces.available()) is not None:
        parser.error(f"{reason}; run the case memory only")
    host = machine()
    print(f"{options.rounds} rounds; {host}", flush=True)
    results = []
    for case in cases(what, options.rate * 1e6, options.largest, options.largest_shaped):
        if options.ranks not in (None, case.ranks) and case.transport == "shaped":
            continue
        rows = run(case, options.rounds, [OURS, OPEN_MPI, SEGMENTED, GLOO])
        show(case, rows)
        results.append({"transport": case.transport, "ranks": case.ranks, "rate_Bps": case.rate_Bps, "rows": rows})
    if "servers" in what:
        results.append({"transport": "servers", "rows": servers(options.rate * 1e6, options.rounds, options.plot)})
    if options.json:
        options.json.write_text(json.dumps({"machine": host, "results": results}))


if __name__ == "__main__":
    main()
