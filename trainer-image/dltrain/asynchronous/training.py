"""Asynchronous training with a parameter server, or stale-synchronous training within a bound.

A worker reads the parameters, computes the gradient of its part of its next batch, and sends it. The server applies
each gradient on arrival, and replies with the parameters when the worker may start its next step. The learning rate of
an update is the schedule's rate at the worker's step, multiplied by the worker's fraction of the batch. Therefore, when
every worker has made the step, the parameters have moved as far as in a synchronous step, with any optimizer. The
optimizer's state is on the server.
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
    """Train ``model`` asynchronously until all steps are done. All ranks, the workers and the server, must call it.

    Afterwards every rank holds the same parameters and, if checkpoints are enabled, a durable checkpoint contains them.
    ``loss_of``: function that returns the loss of (model, batch). ``end_of_epoch``: called on a worker after each of
    its own epochs, which end at different times on different workers. ``alive_s``: seconds between repeated progress
    updates of a waiting rank.

    Raise PeerLostError if a rank is lost, DivergedError if a loss or gradient is not finite, and SystemExit if a rank
    was asked to stop.
    """
    model.to(trainer.device)
    replicate(model, trainer.process_group)
    total = Sampler.planned(trainer.plan, loader.samples).steps(trainer.plan)
    run = Run(trainer, model, optimizer, total, alive_s)
    trainer.checkpoint_manager.use_samples(loader.samples)
    if trainer.rank == run.server:
        Server(run).serve()
    else:
        Worker(run).train(loader, loss_of, end_of_epoch)
    trainer.step = trainer.total_steps
    run.save()
    run.wait_for_checkpoint()
