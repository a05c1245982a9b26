"""Compare a training step of dljob with PyTorch's DDP over gloo on 2 ranks.

    python -m benchmarks.training.steps.train_step

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

from typing import Any

import numpy as np
from benchmarks.lib.figures import at_most, ratio
from benchmarks.lib.two_machines import options, results
from benchmarks.training.ranks.train_step import ALONE, DDP, HOOKED, MODELS, OURS


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
    header = (
        "| gradients | where | dljob, ms | dljob with DDP, ms | plain DDP, ms | without communication, ms "
        "| link time, ms | exposed, dljob, ms | exposed, dljob with DDP, ms | exposed, plain DDP, ms "
        "| waited after backward, dljob, ms | dljob / plain DDP | dljob with DDP / plain DDP |\n|" + "---|" * 13
    )
    for model, place, rate_Bps, found in results(
        "benchmarks.training.ranks.train_step", options(__doc__, MODELS), header
    ):
        show(model, place, found, rate_Bps)


if __name__ == "__main__":
    main()
