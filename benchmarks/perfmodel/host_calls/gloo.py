"""Measure what collectives over gloo add to the steps of small programs on two ranks of this machine.

    python -m benchmarks.perfmodel.host_calls.gloo [--rounds 5] [--programs 24] [--quantile 0.5] [--json FILE]

Random programs train a small model, and start random collectives of random sizes in each step: two ranks with a core
each. Each rank takes turns between two process groups: one of both ranks, and one of itself alone. The difference is
the time of the messages, without that of the call (``structure.CALL_S``). Everything else is the same, also what other
processes take of the machine.

The seconds of a message without its bytes (``exchanges.HOP_S``) and the bandwidth are fitted to every second program.
The error is that of the others. The seconds are divided by the factor of the host that the hardware probe measures.
On a machine that is not idle, a ``--quantile`` of 0.1 gives the steps in which other processes hardly ran.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH
from benchmarks.perfmodel.first_prediction import probed
from scipy.optimize import least_squares
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dljob.cluster.hardware import KEY
from dljob.perf.step.communication import Link
from dljob.perf.step.exchanges import HOP_S, collective_s

TURN_S = 0.15
"""Seconds of a program with one process group in each round."""
WARM_UP = 3
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
MOST = 6
"""Largest number of collectives of a step besides the one of DistributedDataParallel."""
NUMBERS = 2**18
"""Largest number of float32 values in a buffer."""
REDUCE_BPS = 5e9
LIMIT_S = 300.0
Exchange = tuple[str, int]
"""Kind of a collective, and the bytes of its buffer."""


def program(seed: int) -> tuple[list[int], bool, list[Exchange]]:
    """Return (widths of the layers, whether the program uses DistributedDataParallel, collectives of a step)."""
    draw = random.Random(seed)
    widths = [draw.choice((16, 32, 64, 128, 256)) for _ in range(draw.randint(2, 7))]
    parallel = draw.random() < 0.7
    collectives = []
    for _ in range(draw.randint(0 if parallel else 1, MOST)):
        kind = draw.choice(KINDS)
        numbers = 2 * round(exp(draw.uniform(0, log(NUMBERS / 2))))
        collectives.append((kind, 0 if kind == "barrier" else 4 * numbers))
    return widths, parallel, collectives


def made(seed: int, group: Any) -> tuple[Callable[[], object], list[Exchange]]:
    """Return the step of a program with its messages in ``group``, and its collectives with the one for gradients."""
    widths, parallel, collectives = program(seed)
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    if parallel:
        model = DistributedDataParallel(model, process_group=group)
    x, size, me = torch.randn(16, widths[0]), group.size(), dist.get_rank()
    calls: list[Callable[[], object]] = []
    for kind, buffer_nbytes in collectives:
        whole = torch.zeros(max(1, buffer_nbytes // 4))
        part = torch.zeros(whole.numel() // size)
        call: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole, group=group),
            "all_gather": partial(dist.all_gather_single, whole, part, group=group),
            "reduce_scatter": partial(dist.reduce_scatter_single, part, whole, group=group),
            "broadcast": partial(dist.broadcast, whole, 0 if size > 1 else me, group=group),
            "barrier": partial(dist.barrier, group=group),
        }
        calls.append(call[kind])

    def step() -> None:
        model(x).sum().backward()
        for call in calls:
            call()
        optimizer.step()
        optimizer.zero_grad()

    return step, ([("all_reduce", nbytes)] if parallel else []) + collectives


def steps_s(step: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of ``count`` steps, after some that are not measured."""
    times = []
    for i in range(WARM_UP + count):
        begin = time.perf_counter()
        step()
        if i >= WARM_UP:
            times.append(time.perf_counter() - begin)
    return times


def rank_main(rounds: int, programs: int, quantile: float) -> None:
    """Measure all programs on this rank. Rank 0 prints [seconds alone, seconds together] of each as JSON."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = []
    for seed in range(programs):
        torch.manual_seed(seed)
        pair = [made(seed, group)[0] for group in (alone, dist.group.WORLD)]
        number = torch.tensor([int(TURN_S / max(1e-5, median(steps_s(pair[1], 5)))) + 5])
        dist.broadcast(number, 0)
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for each, step in zip(times, pair, strict=True):
                dist.barrier()
                each += steps_s(step, int(number.item()))
        found.append([float(np.quantile(each, quantile)) for each in times])
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def measured(rounds: int, programs: int, quantile: float) -> list[list[float]]:
    """Return [seconds of a step in a group of one rank, in the group of both] for each program."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--rank"]
    command += ["--rounds", str(rounds), "--programs", str(programs), "--quantile", str(quantile)]
    base = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command, env=os.environ | base | {"RANK": str(rank), "WORLD_SIZE": "2"}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed; its error is above")
    rows: list[list[float]] = json.loads(outputs[0].splitlines()[-1])
    return rows


def added_s(exchanges: list[Exchange], hop_s: float, bandwidth_Bps: float) -> float:
    """Return the predicted seconds of these collectives on two ranks."""
    link = Link(hop_s, bandwidth_Bps, REDUCE_BPS)
    return sum(float(collective_s(kind, float(nbytes), 2.0, link, 1)) for kind, nbytes in exchanges)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--programs", type=int, default=24)
    parser.add_argument("--quantile", type=float, default=0.5, help="quantile of the steps of a program that counts")
    parser.add_argument("--json", type=Path, help="File for all measurements")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rounds, options.programs, options.quantile)
        return
    hardware = probed()[0][KEY, "cpu"].hardware
    if hardware is None:
        raise SystemExit("the hardware probe measured nothing; look at its output")
    host, near = hardware.factors.host, hardware.near
    rows = measured(options.rounds, options.programs, options.quantile)
    exchanges = []
    for seed in range(options.programs):
        widths, parallel, collectives = program(seed)
        parameters = sum((a + 1) * b for a, b in pairwise(widths))
        exchanges.append(([("all_reduce", 4 * parameters)] if parallel else []) + collectives)

    def errors(x: Any, seeds: range) -> list[float]:
        return [log((rows[i][0] + added_s(exchanges[i], exp(x[0]), exp(x[1]))) / rows[i][1]) for i in seeds]

    fitted = least_squares(errors, [log(HOP_S), log(1e9)], args=(range(0, options.programs, 2),), loss="soft_l1").x
    print(f"factor of the host: {host:.2f}; link within the node by MPI: {near}; {machine()}")
    print("| program | collectives, KiB | alone, us | together, us | predicted together / measured |")
    print("|---" * 5 + "|")
    for i, row in enumerate(rows):
        predicted_s = row[0] + added_s(exchanges[i], *np.exp(fitted))
        text = ", ".join(f"{kind} {nbytes / 1024:.0f}" for kind, nbytes in exchanges[i])
        print(f"| {i}{'' if i % 2 else ' (fitted)'} | {text} | {1e6 * row[0]:.0f} | {1e6 * row[1]:.0f} |"
              f" {predicted_s / row[1]:.2f} |")  # fmt: skip
    others = [abs(each) for each in errors(fitted, range(1, options.programs, 2))]
    print(f"HOP_S: {exp(fitted[0]) / host:.3g}, bandwidth {exp(fitted[1]):.3g} B/s")
    print(
        f"programs that were not fitted: median error {100 * (exp(median(others)) - 1):.0f} %, largest "
        f"{100 * (exp(max(others)) - 1):.0f} %"
    )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "host": host, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
