"""Run a rank of the built-in trainer without its evaluation, and print its main memory at several times."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch


def resident_nbytes() -> int:
    """Return the main memory of this process that is resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    from dltrain.builtin import rank
    from dltrain.train import session
    from dltrain.train.trainer import Trainer

    created: list[int] = []

    def measured(trainer: Trainer) -> None:
        train_tiny_model()
        started, wrap = resident_nbytes(), trainer.wrap

        def wrapped(*args: Any, **named: Any) -> Any:
            found = wrap(*args, **named)
            created.append(peak_nbytes())
            return found

        trainer.wrap = wrapped  # type: ignore[method-assign]
        rank.train(trainer)
        row = {"started": started, "created": created[0], "peak": peak_nbytes()}
        sys.stderr.write(f"memory {json.dumps(row)}\n")

    rank.evaluate = lambda *_: 0.0  # its batches of 256 samples would need more memory than the training
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
