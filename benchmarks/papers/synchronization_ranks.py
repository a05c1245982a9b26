"""A rank of ``synchronization.py``: the trainer's real protocols. Its computing is a pause of random length."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dltrain.asynchronous import training
from dltrain.asynchronous.link import Request, RequestKind
from dltrain.asynchronous.server import Server
from dltrain.builtin.evaluation import mean_loss
from dltrain.data.datasets import load
from dltrain.data.feeding.loader import Loader
from dltrain.optim.optimizers import make_optimizer
from dltrain.train import session
from dltrain.train.trainer import Trainer

SETTINGS_ENV = "SYNCHRONIZATION"


def pauses_s(rank: int, mean_s: float, variation: float, steps: int) -> list[float]:
    """Return the seconds that a rank computes in each step, which are the same for every kind of synchronization.

    They follow a gamma distribution. Without variation, they are equal.
    """
    if not variation:
        return [mean_s] * steps
    rng = np.random.default_rng(rank)
    return [float(x) for x in rng.gamma(variation**-2, mean_s * variation**2, steps)]


class Paced:
    """A loss that first pauses, as if the rank computed, and notes when each step began and when it was computed."""

    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        slow = settings["slow_factor"] if rank == 0 else 1.0
        self._pauses_s = pauses_s(rank, slow * settings["pause_s"], settings["variation"], settings["steps"])
        self.began_s: list[float] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        # The monotonic clock is the same for all processes of a machine.
        self.began_s.append(time.monotonic())
        time.sleep(self._pauses_s[len(self.began_s) - 1])
        return mean_loss(model(batch[0]), batch[1])


class Relay(Server):
    """A server that receives gradients and sends parameters, but never applies a gradient."""

    def _take(self, worker: int, request: Request) -> float:
        if request.kind != RequestKind.UPDATE:
            return super()._take(worker, request)
        self._flat.receive(self._link, self._run.ranks[worker], self._flat.buffer.flat)
        self._clocks.step(worker)
        self._tell()
        return 0.0


def train(trainer: Trainer) -> None:
    """Train for the plan's steps, and write when this rank began each step, and its mean phases, to a file."""
    settings = json.loads(os.environ[SETTINGS_ENV])
    if not settings["applies"]:
        vars(training)["Server"] = Relay
    data = load(trainer.plan.dataset, trainer.plan.seed)
    torch.manual_seed(trainer.plan.seed)
    width = settings["width"]
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, data.shape.classes))
    optimizer, paced = make_optimizer(trainer.plan.optimizer, network), Paced(trainer.rank, settings)
    if trainer.plan.synchronization == "Synchronous":
        model, optimizer = trainer.wrap(network, optimizer)
        for batch in trainer.steps(trainer.loader(data)):
            loss = paced(model, batch)
            trainer.log(loss=loss)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    else:
        trainer.model = network
        loader = trainer.loader(data)
        assert isinstance(loader, Loader), "the data has random access"
        training.train(trainer, network, optimizer, loader, paced, lambda: None)
    path = Path(settings["folder"], f"{trainer.rank}.json")
    path.write_text(json.dumps({"began_s": paced.began_s, "ended_s": time.monotonic()}))


if __name__ == "__main__":
    session.leave(session.run(train))
