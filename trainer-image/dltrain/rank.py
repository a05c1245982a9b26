"""A rank of the built-in trainer: ``python -m dltrain.rank``, started by mpirun under an agent, or by hand.

It is a script on the five-line API like any user's, and nothing more privileged.
"""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from dltrain import session
from dltrain.data import Dataset, load
from dltrain.errors import BadInputError
from dltrain.loop import Trainer
from dltrain.lr import rate
from dltrain.messages import PLAN_ENV
from dltrain.models import build
from dltrain.optimizers import make_optimizer
from dltrain.pipeline import Pipeline
from dltrain.probe import settle
from dltrain.rangetest import find_rate

_EVALUATION_BATCH = 256


def main() -> int:
    """Train what ``$DLTRAIN_PLAN`` says; returns the exit code. Reads the environment only here, not on import."""
    return session.run(train)


def train(trainer: Trainer) -> None:
    """Train the plan's built-in model on its dataset."""
    plan = trainer.plan
    data = load(plan.dataset, plan.seed)
    if plan.model.name is None:
        raise BadInputError("spec.model", f"no built-in model in ${PLAN_ENV}", "a name", "set spec.trainer.command")
    torch.manual_seed(plan.seed)
    network = build(plan.model.name, data.shape)
    (x, _), optimizer = data.train(np.arange(1)), make_optimizer(plan.optimizer, network)
    model, optimizer = trainer.wrap(network, optimizer, sample=x.to(trainer.device))
    _settle(trainer, data)
    loader, peak = trainer.loader(data), plan.optimizer.learning_rate
    if plan.optimizer.find_rate:
        peak = find_rate(trainer, loader, lambda model, batch: mean_loss(model(batch[0]), batch[1]))
    for x, y in trainer.steps(loader):
        for group in optimizer.param_groups:
            base = peak * trainer.learning_rate_factor
            group["lr"] = rate(base, trainer.step, trainer.total_steps)
        _differentiate(trainer, model, x, y)
        optimizer.step()
        if trainer.end_of_epoch:
            trainer.log(accuracy=evaluate(trainer, model, data))


def _differentiate(trainer: Trainer, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Forward and backward, and the loss told by a rank that knows it."""
    if isinstance(trainer.parallel, Pipeline):
        if (mean := trainer.parallel.run(x, y, mean_loss)) is not None:
            trainer.log(loss=mean)
        return
    loss = mean_loss(model(x), y)
    trainer.log(loss=loss)
    loss.backward()  # type: ignore[no-untyped-call]


def _settle(trainer: Trainer, data: Dataset) -> None:
    """Probe with training samples, in any order and as often as needed."""
    if trainer.settled and trainer.step:
        return  # a resumed run has been probed before
    if trainer.parallel.whole_batch:
        return  # a part of a model is no model whose time could be learned

    def step(model: nn.Module, optimizer: Optimizer, samples: int) -> None:
        x, y = (part.to(trainer.device) for part in data.train(np.arange(samples) % data.train_samples))
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    settle(trainer, lambda model: make_optimizer(trainer.plan.optimizer, model), step)


def mean_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy, mean over samples (and positions, of tokens)."""
    return cross_entropy(logits.flatten(0, -2), y.flatten())


@torch.no_grad()
def evaluate(trainer: Trainer, model: nn.Module, data: Dataset) -> float:
    """Part of the held-out samples (tokens: positions) told right; every worker looks at as many of them, or all
    look at all together."""
    model.eval()
    right = seen = 0
    together = trainer.parallel.whole_batch
    mine = np.arange(0 if together else trainer.worker, data.test_samples, 1 if together else trainer.workers)
    for begin in range(0, len(mine), _EVALUATION_BATCH):
        x, y = (part.to(trainer.device) for part in data.test(mine[begin : begin + _EVALUATION_BATCH]))
        if (logits := trainer.parallel.predict(model, x)) is not None:
            right += int((logits.argmax(-1) == y).sum())
            seen += y.numel()
    model.train()
    right_of_all, seen_of_all = trainer.sum([right, seen])
    return right_of_all / seen_of_all


if __name__ == "__main__":
    session.leave(main())
