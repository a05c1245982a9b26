"""Compare a training step of strategy Sharded with PyTorch's ``fully_shard`` and DDP over gloo on 2 ranks.

    python -m benchmarks.training.steps.sharded_step [--rounds 15] [--model gpt-mini]

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

from typing import Any

import numpy as np
from benchmarks.lib.figures import at_most, ratio, text
from benchmarks.lib.two_machines import options, results
from benchmarks.training.ranks.sharded_step import DDP, FSDP, MODELS, OURS

BAR = 1.05


def show(model: str, where: str, found: dict[str, Any]) -> None:
    steps = {name: np.array(times) for name, times in found["seconds"].items()}
    ms = [f"{1e3 * float(np.median(steps[name])):.1f}" for name in (OURS, FSDP, DDP)]
    mb = [f"{1e-6 * found['stored_nbytes'][name]:.1f}" for name in (OURS, FSDP, DDP)]
    print(f"| {model} | {where} | {' | '.join(ms)} | {' | '.join(mb)} | ", end="")
    print(f"{at_most(ratio(steps[OURS], steps[FSDP]), BAR)} | {text(ratio(steps[OURS], steps[DDP]))} |", flush=True)


def main() -> None:
    header = (
        "| model | where | dljob, ms | fully_shard, ms | DDP, ms | stored by dljob, MB | by fully_shard, MB "
        "| by DDP, MB | dljob / fully_shard | dljob / DDP |\n|" + "---|" * 10
    )
    for model, place, _, found in results("benchmarks.training.ranks.sharded_step", options(__doc__, MODELS), header):
        show(model, place, found)


if __name__ == "__main__":
    main()
