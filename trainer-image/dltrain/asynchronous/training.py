"""Training by a parameter server without lockstep: asynchronous, or stale-synchronous within a bound.

A worker reads the parameters, computes the gradient of its part of its next batch, and sends it; the server applies
each as it comes, and answers with the parameters once ``clocks`` allow the next step. An update's learning rate is the
schedule's at the worker's step times the worker's part of the batch: when every worker has made its step, they have
moved the parameters as far as a step in lockstep would, with any optimizer, whose state is the server's.
"""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from dltrain.asynchronous.run import Run
from dltrain.asynchronous.server import Server
from dltrain.asynchronous.worker import LossOf, Worker
from dltrain.batch.sampling import Sampler
from dltrain.checkpoint.state import replicate
from dltrain.data.feeding.loader import Loader
from dltrain.train.trainer import Trainer


def train(
    trainer: Trainer,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Loader,
    loss_of: LossOf,
    end_of_epoch: Callable[[], None],
    alive_s: float = 1.0,
) -> None:
    """All steps of all ranks. Afterwards every rank holds the same parameters, and a checkpoint is durable.

    ``end_of_epoch``: on a worker after each of its own, when others are elsewhere. ``alive_s``: between signs of life
    of a rank that waits. Raises SystemExit when the ranks agreed to stop, PeerLostError, DivergedError.
    """
    model.to(trainer.device)
    replicate(model, trainer.world.broadcast)
    total = Sampler.planned(trainer.plan, loader.samples).steps(trainer.plan)
    run = Run(trainer, model, optimizer, total, alive_s)
    if trainer.rank == run.server:
        Server(run).serve()
    else:
        Worker(run).train(loader, loss_of, end_of_epoch)
    trainer.step = trainer.total_steps
    run.save()
    run.wait_for_checkpoint()
