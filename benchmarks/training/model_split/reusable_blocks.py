"""Compare memory and processor time of ranks with reusable blocks of tensors with those of ranks with glibc's.

    hack/env python -m benchmarks.training.model_split.reusable_blocks [--model resnet18 …] [--rounds 5] [--steps 12]
        [--strategy Tensor …]

Ranks of this machine with one thread each train built-in models (the cases of ``memory``). Both kinds of blocks
(``dltrain/host/reusable_blocks.c``) run in turn, in alternating order. ``peak`` is that of the rank with the most
memory, beside what it has when it begins. Times are the processor time of all ranks from the first step to the end of
the evaluation, which other load disturbs less than the elapsed time. The ratio of times is the median of the rounds'
ratios with its 95 % interval, and must be at most 1.02. No median of the peaks may grow by more than 2 %.
"""

import argparse
from collections.abc import Callable

import numpy as np
from benchmarks.lib.figures import at_most, machine, ratio
from benchmarks.training.model_split.memory import MIB, Case, cases, measured_nbytes

from dljob.perf.workload.models import MODELS
from dltrain.host import heap
from dltrain.launch.preload import preload

LARGEST_RATIO = 1.02


def measured(case: Case, steps: int, allocate: Callable[[], bool]) -> dict[str, int]:
    """Return memory and processor time of the case. ``allocate``: what ranks call to change torch's blocks."""
    given, heap.allocate_reusable_blocks = heap.allocate_reusable_blocks, allocate
    try:
        return measured_nbytes(case, steps)
    finally:
        heap.allocate_reusable_blocks = given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", nargs="*", choices=sorted(MODELS), default=["gpt-mini", "resnet18"])
    parser.add_argument("--strategy", nargs="*", choices=("Data", "Pipeline", "Tensor"), default=["Data"])
    options = parser.parse_args()
    print(machine(), flush=True)
    preload()
    kinds = {"reusable": heap.allocate_reusable_blocks, "plain": lambda: False}
    print(f"{'case':48}  peak: plain, reusable, ratio      time of a step: plain, reusable, ratio", flush=True)
    for case in cases():
        if case.model not in options.model or case.strategy not in options.strategy:
            continue
        found: dict[str, list[dict[str, int]]] = {kind: [] for kind in kinds}
        for number in range(options.rounds):
            for kind in sorted(kinds, reverse=bool(number % 2)):
                found[kind].append(row := measured(case, options.steps, kinds[kind]))
                text = f"{row['peak'] / MIB:.0f} MiB, {row['cpu_us'] / 1e6:.2f} s"
                print(f"round {number}: {case.text}, {kind}: {text}", flush=True)
        peaks, times = (
            {kind: np.array([row[name] for row in rows], dtype=np.float64) for kind, rows in found.items()}
            for name in ("peak", "cpu_us")
        )
        plain, reusable = (float(np.median(peaks[kind])) / MIB for kind in ("plain", "reusable"))
        before, after = (float(np.median(times[kind])) / 1e3 / options.steps for kind in ("plain", "reusable"))
        bound = "MISSED" if reusable > LARGEST_RATIO * plain else "met"
        print(
            f"{case.text:48}  {plain:5.0f} {reusable:5.0f} MiB {reusable / plain:.3f} {bound}  "
            f"{before:7.1f} {after:7.1f} ms {at_most(ratio(times['reusable'], times['plain']), LARGEST_RATIO)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
