"""Compare the final accuracy of two ranks (uneven local batch sizes, ring) with that of one process, over seeds.

    hack/env python -m benchmarks.training.exactness

Seeds, batches and initial weights are the same, so results differ only by rounding and its consequences. Threshold: the
95 % interval of the paired difference lies within ±1 point. Exit code 1 if it is missed.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import tempfile
from pathlib import Path

from benchmarks.lib.local_ranks import local_plan, mpirun, run_captured

from dlcontract import ModelRef, OptimizerRef

BATCH = 120
POINT = 0.01
STUDENT_95 = {4: 2.776, 9: 2.262, 19: 2.093, 29: 2.045}
"""Two-sided 95 % quantile of Student's t-distribution by degrees of freedom."""


def accuracy(shares: list[int], seed: int, epochs: int, model: str, folder: Path) -> float:
    """Train and return the accuracy on all held-out samples."""
    wanted = local_plan(
        shares,
        model=ModelRef(name=model),
        optimizer=OptimizerRef(learning_rate=0.05),
        epochs=epochs,
        seed=seed,
    )
    output = run_captured(wanted, folder, mpirun(len(shares)) if len(shares) > 1 else ())
    found = re.search(r"finished \d+ steps .*, accuracy ([\d.]+)", output)
    if found is None:
        raise SystemExit(f"found no accuracy in the trainer's output:\n{output}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, choices=[n + 1 for n in STUDENT_95])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--model", default="mlp", choices=["mlp", "digits-cnn"])
    options = parser.parse_args()
    alone, ring = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            alone.append(accuracy([BATCH], seed, options.epochs, options.model, Path(folder)))
            ring.append(accuracy([BATCH // 3, BATCH - BATCH // 3], seed, options.epochs, options.model, Path(folder)))
            print(f"seed {seed}: one process {alone[-1]:.4f}, ring {ring[-1]:.4f}", flush=True)
    differences = [b - a for a, b in zip(alone, ring, strict=True)]
    mean = statistics.mean(differences)
    half = STUDENT_95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    within = mean - half >= -POINT and mean + half <= POINT
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "model": options.model,
        "accuracy_one_process": statistics.mean(alone),
        "accuracy_ring": statistics.mean(ring),
        "difference": mean,
        "interval_95": [mean - half, mean + half],
        "within_one_point": within,
    }
    print(json.dumps(result, indent=1))
    raise SystemExit(0 if within else 1)


if __name__ == "__main__":
    main()
