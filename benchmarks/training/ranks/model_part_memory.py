"""Run a rank of the built-in trainer. Print its main memory at several times, its processor time, and reduced bytes.

The rank evaluates its first held-out samples only: two whole batches and a smaller one.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def resident_nbytes(kind: str = "VmRSS") -> int:
    """Return the main memory of this process that is resident now. ``kind``: a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{kind}:")))


def main() -> None:
    """Run the rank of the plan in ``$DLTRAIN_PLAN``, with one thread. Exit the process."""
    torch.set_num_threads(1)
    from dltrain.builtin import rank
    from dltrain.builtin.evaluation import largest_batch
    from dltrain.data.datasets import Dataset
    from dltrain.parallel.bucket_reductions import BucketReductions
    from dltrain.train import session
    from dltrain.train.trainer import Trainer

    created, began_s, reduced = list[int](), list[float](), [0]
    start = BucketReductions._start

    def counted(reductions: BucketReductions, bucket: int) -> None:
        reduced[0] += reductions._collective.buffers[bucket].nbytes
        start(reductions, bucket)

    mine: Callable[[Trainer, Dataset], NDArray[np.int64]] = rank._mine

    def first(trainer: Trainer, data: Dataset) -> NDArray[np.int64]:
        return mine(trainer, data)[: 2 * largest_batch(trainer.plan, trainer.shares, trainer.rank) + 1]

    def measured(trainer: Trainer) -> None:
        train_tiny_model()
        row = {"rank": trainer.rank, "started": resident_nbytes(), "anonymous": resident_nbytes("RssAnon")}
        wrap = trainer.wrap

        def wrapped(*args: Any, **named: Any) -> Any:
            found = wrap(*args, **named)
            created.append(peak_nbytes())
            began_s.append(time.process_time())
            return found

        trainer.wrap = wrapped  # type: ignore[method-assign]
        rank.train(trainer)
        row |= {"created": created[0], "peak": peak_nbytes(), "shared": resident_nbytes("RssShmem")}
        row |= {"cpu_us": round(1e6 * (time.process_time() - began_s[0])), "reduced_nbytes": reduced[0]}
        sys.stderr.write(f"memory {json.dumps(row)}\n")

    rank._mine = first
    BucketReductions._start = counted  # type: ignore[method-assign,assignment]
    session.leave(session.run(measured))


def train_tiny_model() -> None:
    """Train a tiny model for a step, and count its costs, so that torch has imported all that this takes."""
    from dltrain.models import InputShape, build
    from dltrain.parallel.model_split.pipeline_stages import costs

    model = build("digits-cnn", InputShape((1, 8, 8), 10))
    costs(model, torch.zeros(1, 1, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.zeros(2, 1, 8, 8)).sum().backward()
    optimizer.step()


def peak_nbytes() -> int:
    """Return the largest main memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
