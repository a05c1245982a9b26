"""Run a rank of the built-in trainer: ``python -m dltrain.builtin.rank``.

An agent starts this command with mpirun. It can also be started by hand.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from dlcontract import Plan
from dltrain.analysis.collection import Collection
from dltrain.asynchronous import training
from dltrain.batch.shares import apportion
from dltrain.builtin import saved_model
from dltrain.builtin.evaluation import collect, count_correct, largest_batch, mean_loss
from dltrain.builtin.probe import probe_and_rebalance
from dltrain.builtin.range_test import find_rate
from dltrain.data.datasets import Dataset, load, some_samples
from dltrain.data.feeding.loader import Loader
from dltrain.models import blocks_of, build
from dltrain.models.deferred import deferred
from dltrain.optim.learning_rate import rate
from dltrain.optim.optimizers import make_optimizer
from dltrain.parallel.model_split.pipeline import Pipeline
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import PLAN_ENV
from dltrain.reporting.evaluation import share
from dltrain.train import session
from dltrain.train.trainer import Trainer


def main() -> int:
    """Train as described by the plan in the file ``$DLTRAIN_PLAN``. Return the exit code of the process."""
    return session.run(train)


def train(trainer: Trainer) -> None:
    """Train the plan's built-in model on its dataset."""
    plan = trainer.plan
    data = load(plan.dataset, plan.seed)
    if plan.model.name is None:
        remedy = "set spec.model.name, or spec.trainer.command for a training script"
        raise BadInputError("spec.model.name", f"no name in ${PLAN_ENV}", "the name of a built-in model", remedy)
    trainer.divide(data)
    torch.manual_seed(plan.seed)
    network = _network(plan, data)
    (x, _), optimizer = data.train(some_samples(data, 1)), make_optimizer(plan.optimizer, network)
    if plan.synchronization != "Synchronous":
        _train_asynchronously(trainer, network, optimizer, data)
        return
    if plan.activation_checkpointing:
        trainer.checkpoint_activations(blocks_of(network))
    model, optimizer = trainer.wrap(network, optimizer, sample=x.to(trainer.device))
    if trainer.rank == 0:
        saved_model.write(plan, data)
    _settle(trainer, data)
    loader, peak = trainer.loader(data), plan.optimizer.learning_rate
    assert isinstance(loader, Loader), "the data has random access"
    if plan.optimizer.find_rate:
        peak = find_rate(trainer, loader, partial(loss_and_accuracy, trainer))
    scaler = trainer.grad_scaler()
    for x, y in trainer.steps(loader, accumulate=True):
        for group in optimizer.param_groups:
            base = peak * trainer.learning_rate_factor
            group["lr"] = rate(base, trainer.step, trainer.total_steps)
        trainer.run(model, x, y, mean_loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        if trainer.end_of_epoch or trainer.complete:
            trainer.log(accuracy=evaluate(trainer, model, data))


def _network(plan: Plan, data: Dataset) -> nn.Module:
    """Return the plan's built-in model with its initial weights.

    If ranks split the model, its parameters have no memory yet: ``wrap`` gives each rank the values of its part.
    """
    make = partial(build, plan.model.name or "", data.shape)
    return deferred(make) if plan.splits_model and len(plan.ranks) > 1 else make()


def _loss(trainer: Trainer, model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch in float32. The model computes in the precision of the plan."""
    x, y = batch
    with trainer.autocast():
        return mean_loss(model(x), y)


def loss_and_accuracy(
    trainer: Trainer, model: nn.Module, batch: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (mean loss of a batch in float32, fraction of correct predictions)."""
    x, y = batch
    with trainer.autocast():
        logits = model(x)
        return mean_loss(logits, y), (logits.detach().argmax(-1) == y).float().mean()


def _settle(trainer: Trainer, data: Dataset) -> None:
    """Probe the devices and links, and rebalance local batch sizes, unless a resumed run has already done so.

    With model parallelism, do nothing. The probe trains on the first training samples, and uses them more than once if
    its batch is larger than the dataset.
    """
    if trainer.settled and trainer.step:
        return  # a resumed run has been probed before
    if trainer.plan.splits_model:
        return  # the time of a part of a model is not useful for calibration

    def step(model: nn.Module, optimizer: Optimizer, samples: int) -> None:
        batch = [part.to(trainer.device) for part in data.train(some_samples(data, samples))]
        optimizer.zero_grad()
        _loss(trainer, model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    probe_and_rebalance(trainer, lambda model: make_optimizer(trainer.plan.optimizer, model), step)


def evaluate(trainer: Trainer, model: nn.Module, data: Dataset) -> float:
    """Return the accuracy on the held-out samples (for tokens: positions). All workers compute it together.

    At the end of the training, also report an analysis of the predictions. A job with a target (``spec.until``) may end
    after any evaluation, so each one is analysed.
    """
    chosen = _mine(trainer, data)
    predict = partial(trainer.parallel.predict, model)
    model.eval()
    with trainer.autocast():
        if trainer.complete or trainer.plan.until is not None:
            accuracy = _analysed(trainer, predict, data, chosen)
        else:
            largest = largest_batch(trainer.plan, trainer.shares, trainer.rank)
            right, seen = trainer.sum(count_correct(predict, data, chosen, trainer.device, largest))
            accuracy = right / seen
    model.train()
    return accuracy


def _analysed(
    trainer: Trainer,
    predict: Callable[[torch.Tensor], torch.Tensor | None],
    data: Dataset,
    chosen: NDArray[np.int64],
) -> float:
    """Analyse the predictions of all workers, and return the accuracy.

    If each rank computes a part of each layer, all ranks of a replica have the same predictions. Only those of the
    first one count then.
    """
    plan = trainer.plan
    largest = largest_batch(plan, trainer.shares, trainer.rank)
    found = collect(predict, data, chosen, trainer.device, largest)
    if plan.splits_model and trainer.rank % plan.split_over and not isinstance(trainer.parallel, Pipeline):
        found = Collection()
    analysis = share(found, data.labels, trainer)
    figures = None if analysis is None else analysis.classification or analysis.language
    return 0.0 if figures is None else figures.accuracy


def _mine(trainer: Trainer, data: Dataset) -> NDArray[np.int64]:
    """Return the numbers of the held-out samples that this rank evaluates.

    The ranks divide the samples in proportion to their local batch sizes. With model parallelism, the replicas of the
    model divide them, and each rank gets all samples of its replica.
    """
    plan, shares, mine = trainer.plan, trainer.shares, trainer.rank
    if plan.splits_model:
        shares, mine = shares[:: plan.split_over], trainer.rank // plan.split_over
    parts = apportion(data.test_samples, shares)
    begin = sum(parts[:mine])
    return np.arange(begin, begin + parts[mine])


def _train_asynchronously(trainer: Trainer, network: nn.Module, optimizer: Optimizer, data: Dataset) -> None:
    """Train the built-in model asynchronously, with a parameter server, and log its accuracy.

    Rank 0 evaluates the model after each of its epochs. At the end, all workers evaluate it together.
    """
    trainer.model = network.to(trainer.device)
    if trainer.rank == 0:
        saved_model.write(trainer.plan, data)
    _settle(trainer, data)

    def right(chosen: NDArray[np.int64]) -> tuple[int, int]:
        network.eval()
        largest = largest_batch(trainer.plan, trainer.shares, trainer.rank)
        found = count_correct(network, data, chosen, trainer.device, largest)
        network.train()
        return found

    def end_of_epoch() -> None:
        if trainer.rank == 0:
            correct, seen = right(np.arange(data.test_samples))
            trainer.log(accuracy=correct / seen)

    loader = trainer.loader(data)
    assert isinstance(loader, Loader), "the data has random access"
    training.train(
        trainer, network, optimizer, loader, lambda model, batch: mean_loss(model(batch[0]), batch[1]), end_of_epoch
    )
    if trainer.shares[trainer.rank]:
        network.eval()
        trainer.log(accuracy=_analysed(trainer, network, data, _mine(trainer, data)))


if __name__ == "__main__":
    session.leave(main())
