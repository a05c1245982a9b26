"""Our all-reduce against Open MPI's and gloo's, by size: ``python benchmarks/allreduce.py [--ranks 2] [--rounds 15]``.

All candidates run in the same processes, taking turns within every round, so that a noisy machine disturbs them
alike. A figure is the median over rounds of the slowest rank's time; a ratio is the median of the rounds' ratios with
its 95 % interval (bootstrap), above 1 where our ring is faster. GB/s are bytes of the buffer per second.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SIZES = [2**16, 2**18, 2**20, 2**22, 2**24, 2**26]
TURN_S = 0.02
"""A turn repeats its sum for about so long."""
OURS = "ring"


def worker(rounds: int, segment_nbytes: int) -> None:
    import torch
    from mpi4py import MPI

    from dltrain.comm.choose import choose
    from dltrain.world import World

    torch.set_num_threads(1)
    world = World.start()
    rows = []
    for nbytes in SIZES:
        buffers = {name: torch.zeros(nbytes // 4) for name in (OURS, "open mpi", "open mpi, ours", "gloo")}
        ring = choose("Ring", world.comm, [buffers[OURS]], segment_nbytes=segment_nbytes)
        wrapped = choose("MPI", world.comm, [buffers["open mpi, ours"]])
        gloo = choose("Torch", world.comm, [buffers["gloo"]])
        plain = buffers["open mpi"].numpy()
        candidates: dict[str, Callable[[], object]] = {
            OURS: lambda ring=ring: ring.allreduce(0),  # type: ignore[misc]
            "open mpi": lambda plain=plain: world.comm.Allreduce(MPI.IN_PLACE, plain),  # type: ignore[misc]
            "open mpi, ours": lambda wrapped=wrapped: wrapped.allreduce(0),  # type: ignore[misc]
            "gloo": lambda gloo=gloo: gloo.allreduce(0),  # type: ignore[misc]
        }
        times: dict[str, list[float]] = {name: [] for name in candidates}
        repeats = {name: repeats_for(world.comm, sum_once) for name, sum_once in candidates.items()}
        for turn in range(rounds):
            names = list(candidates)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                world.comm.Barrier()
                began = time.perf_counter()
                for _ in range(repeats[name]):
                    candidates[name]()
                spent = (time.perf_counter() - began) / repeats[name]
                times[name].append(world.comm.allreduce(spent, MPI.MAX))
        for collective in (ring, wrapped, gloo):
            collective.close()
        rows.append({"nbytes": nbytes, "seconds": times})
    if world.rank == 0:
        sys.stdout.write(json.dumps(rows) + "\n")
    world.close()


def repeats_for(comm: Any, sum_once: Callable[[], object]) -> int:
    """As many repetitions as fit a turn, the same on every rank."""
    sum_once()
    began = time.perf_counter()
    sum_once()
    took_s: float = comm.bcast(time.perf_counter() - began)
    return max(1, round(TURN_S / took_s))


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def machine() -> str:
    import torch

    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")  # noqa: SIM115, PTH123
    load = os.getloadavg()[0]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} x {model}, load {load:.1f} before, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--segment", type=int, default=2**17, help="bytes of a segment of the ring")
    parser.add_argument("--json", type=Path, help="file for the raw times")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.rounds, options.segment)
        return
    mpirun = [str(Path(sys.prefix) / "bin" / "mpirun"), *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    command = [*mpirun, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(options.ranks), sys.executable]
    arguments = ["--worker", "--rounds", str(options.rounds), "--segment", str(options.segment)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "operator"), str(ROOT / "trainer-image")])}
    host = machine()
    done = subprocess.run([*command, __file__, *arguments], env=env, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    if options.json:
        options.json.write_text(json.dumps({"machine": host, "ranks": options.ranks, "rows": rows}))
    print(f"{options.ranks} ranks, {options.rounds} rounds; {host}")
    others = [name for name in rows[0]["seconds"] if name != OURS]
    print("\n| buffer | " + " | ".join(f"{name} GB/s" for name in (OURS, *others)) + " | ring against the best |")
    print("|" + "---|" * (len(others) + 3))
    best_ratios = []
    for row in rows:
        seconds = {name: np.array(times) for name, times in row["seconds"].items()}
        speeds = [row["nbytes"] / np.median(seconds[name]) / 1e9 for name in (OURS, *others)]
        best = min(others, key=lambda name: float(np.median(seconds[name])))
        ratio, low, high = interval(seconds[best] / seconds[OURS])
        best_ratios.append(ratio)
        cells = " | ".join(f"{speed:.2f}" for speed in speeds)
        print(f"| {row['nbytes'] >> 10} KiB | {cells} | {ratio:.2f} ({low:.2f}–{high:.2f}) of {best} |")
    print(f"\ngeometric mean of the ratios: {np.exp(np.mean(np.log(best_ratios))):.2f}")


if __name__ == "__main__":
    main()
