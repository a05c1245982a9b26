"""Compare measured rounds of asynchronous training with SGD and Adam with the rounds that the planner predicts.

    python -m benchmarks.papers.asynchronous_rounds [--workers 3] [--pause 0.1] [--steps 40] [--width 60000] [--check]

Real workers and a real parameter server train as in ``synchronization.py``; only the workers' computing is a pause. A
server that applies no gradient gives the time of the messages. An SGD update of the same parameters in this process
gives the speed of memory. Everything else is predicted: the server's update with each optimizer moves as many bytes as
in ``perf.step.compute.update_s``, and ``perf.step.asynchronous.round_of`` gives the round. ``--check`` fails (exit code
1) if a predicted round is off by more than 10 %.
"""

import argparse
import sys
import time
from statistics import fmean

import torch
from benchmarks.lib.figures import machine
from benchmarks.papers.synchronization import run

from dlcontract import OptimizerRef
from dljob.perf.step.asynchronous import round_of
from dljob.perf.step.communication import Link
from dljob.perf.step.step import Step

MAX_ERROR = 0.1
REAL_NBYTES = 4
INPUTS, CLASSES = 64, 10
OPTIMIZERS = {
    "SGD": OptimizerRef(learning_rate=1e-4, momentum=0.0),
    "SGD with momentum": OptimizerRef(learning_rate=1e-4, momentum=0.9),
    "Adam": OptimizerRef(name="Adam", learning_rate=1e-4),
}
SLOTS = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}
"""Optimizer state divided by the size of the parameters."""


def bytes_per_s(width: int, repeats: int = 9) -> float:
    """Return the bytes per second that an SGD update and the norm of the gradient move, in one thread."""
    torch.set_num_threads(1)
    shapes = ((width, INPUTS), (width,), (CLASSES, width), (CLASSES,))
    values = [torch.rand(shape) for shape in shapes]
    gradient = torch.rand(sum(v.numel() for v in values))
    parts = [g.view(v.shape) for g, v in zip(torch.split(gradient, [v.numel() for v in values]), values, strict=True)]
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.linalg.vector_norm(gradient)
        for value, part in zip(values, parts, strict=True):
            value.add_(part, alpha=-1e-4)
        took.append(time.perf_counter() - began)
    return 4 * REAL_NBYTES * gradient.numel() / min(took)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of computing in a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=60_000, help="hidden units; there are 75 times as many parameters")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds for each run")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    options.bound = 2
    nbytes = REAL_NBYTES * ((INPUTS + 1) * options.width + (options.width + 1) * CLASSES)
    moved_Bps = bytes_per_s(options.width)
    relayed = run("Asynchronous", 1, 1.0, 0.0, options, applies=False)
    messages_s = max(1e-6, relayed.step_s - fmean(relayed.compute_s))
    link = Link(0.0, 2 * nbytes / messages_s)
    print(f"{nbytes / 1e6:.0f} MB; an update moves {moved_Bps / 1e9:.1f} GB/s; messages {1e3 * messages_s:.1f} ms")
    print(machine())
    columns = f"{'update ms':>9} {'measured ms':>11} {'predicted ms':>12} {'no update ms':>12} {'error %':>7}"
    print(f"\n{'optimizer':18} {'workers':>7} {columns}")
    worst = 0.0
    for name, optimizer in OPTIMIZERS.items():
        for workers in (1, options.workers):
            measured = run("Asynchronous", workers, 1.0, 0.0, options, optimizer)
            think_s, update_s = fmean(measured.compute_s), (4 + 2 * SLOTS[name]) * nbytes / moved_Bps
            alone = Step(think_s, 0.0, 0.0, 0.0, 0.0)
            found = round_of(alone, workers, nbytes, link, None, server_update_s=update_s)
            before = round_of(alone, workers, nbytes, link, None)
            round_s = workers / measured.updates_per_s
            error = found.step_s / round_s - 1
            worst = max(worst, abs(error))
            print(
                f"{name:18} {workers:7} {1e3 * update_s:9.1f} {1e3 * round_s:11.1f} {1e3 * found.step_s:12.1f} "
                f"{1e3 * before.step_s:12.1f} {100 * error:7.1f}",
                flush=True,
            )
    print(f"\nworst error of a round: {100 * worst:.0f} %")
    return 1 if options.check and worst > MAX_ERROR else 0


if __name__ == "__main__":
    sys.exit(main())
