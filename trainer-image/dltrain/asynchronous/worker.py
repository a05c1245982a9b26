"""A worker of asynchronous training, which computes the gradients of its part of each batch."""

import time
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from dltrain.asynchronous.link import Reply, ReplyKind, Request, RequestKind
from dltrain.asynchronous.run import Run
from dltrain.batch.sampling import Part, Sampler
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import Loader
from dltrain.device import randomness
from dltrain.optim.learning_rate import rate
from dltrain.protocol.errors import DivergedError
from dltrain.timing.step_times import Times

LossOf = Callable[[nn.Module, Any], Tensor]
"""Type of a function (model, batch) → mean loss over the samples of the batch."""


class Worker:
    """A worker of asynchronous training.

    In each step, a worker reads the parameters from the parameter server, computes the gradient of its part of the
    batch, and sends this gradient to the server.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._trainer, self._link, self._flat = run, run.trainer, run.link, run.flat
        self._rate = 0.0
        """Learning rate of the last step for the whole batch, before it is multiplied by this worker's fraction of the
        batch."""

    def train(self, loader: Loader, loss_of: LossOf, end_of_epoch: Callable[[], None]) -> None:
        """Train until all workers have done all of their steps.

        ``loss_of``: function that returns the loss of (model, batch). ``end_of_epoch``: called after each epoch of this
        worker. Raise PeerLostError if a rank is lost, DivergedError if the loss is not finite, and SystemExit if a rank
        was asked to stop.
        """
        trainer, plan = self._trainer, self._trainer.plan
        sampler = Sampler.planned(plan, loader.samples)

        def part_of(step: int) -> Part:
            return sampler.part(step, trainer.shares, trainer.rank)

        trainer.step = first = self._run.done[trainer.worker]
        reply = self._ask(Request(RequestKind.PARAMETERS))
        with Feed(loader, part_of, plan.seed, trainer.total_steps) as feed:
            while reply.kind != ReplyKind.OVER:
                if reply.kind == ReplyKind.PAUSE:
                    self._run.pause()
                    reply = self._ask(Request(RequestKind.PARAMETERS))
                    continue
                part = part_of(trainer.step)
                trainer.epoch = part.epoch
                began = time.perf_counter()
                batch = feed.take(trainer.step, part)
                randomness.seed(randomness.of_step(plan.seed, trainer.step, trainer.rank), trainer.device)
                fetched, waited_s, seen = time.perf_counter(), self._link.waited_s, reply.samples
                request = self._compute(batch, part.weight, part.batch, loss_of)
                computed_s = time.perf_counter() - fetched
                trainer.step += 1
                reply = self._ask(request)
                exposed_s = self._link.waited_s - waited_s
                times = Times(fetched - began, computed_s, exposed_s, fetch_s=feed.spent_s)
                # The samples of all workers during this worker's step give the throughput of the job.
                samples = round(reply.samples - seen) if reply.kind != ReplyKind.PAUSE else part.batch
                if trainer.step == first + 1:
                    trainer.progress.warm_up(times, samples, trainer.shares[trainer.rank])
                else:
                    trainer.progress.add(times, samples, trainer.shares[trainer.rank], [])
                if reply.kind != ReplyKind.PAUSE:
                    trainer.progress.asynchronous(reply.staleness, reply.ahead)
                self._tell()
                if part.last:
                    trainer.progress.end_epoch()
                    end_of_epoch()

    def _ask(self, request: Request) -> Reply:
        """Send a request to the parameter server and return its reply. Load the parameters in the reply into the model.

        A reply with ``ReplyKind.PAUSE`` contains no parameters. The request asks for a pause if a checkpoint is due or
        if this rank was asked to stop.
        """
        trainer = self._trainer
        # No checkpoint is due before the first step after a pause, because there would be nothing new to save.
        pause = trainer.reporter.stop.is_set() or (
            trainer.checkpoint_manager.due and request.kind != RequestKind.PARAMETERS
        )
        gradient = self._flat.outgoing(self._flat.buffer.flat) if request.kind == RequestKind.UPDATE else None
        self._link.send(request._replace(pause=float(pause)), self._run.server, gradient)
        reply = self._link.reply(self._run.server)
        if reply.kind != ReplyKind.PAUSE:
            self._flat.receive(self._link, self._run.server, self._flat.values)
        return reply

    def _compute(self, batch: Any, weight: float, samples: int, loss_of: LossOf) -> Request:
        """Compute the gradient of ``batch`` into this worker's buffer. Return the request that sends it to the server.

        ``weight``: this worker's fraction of the global batch; with 0, no gradient is computed or sent. ``samples``:
        global batch size. ``loss_of``: function that returns the loss of (model, batch). Raise DivergedError if the
        loss is not finite.
        """
        trainer = self._trainer
        if not weight:
            return Request(RequestKind.NOTHING)
        self._flat.buffer.attach()
        loss = loss_of(self._run.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for index in range(len(self._flat.buffer.parameters)):
            self._flat.buffer.adopt(index)
        if not isfinite(value := float(loss.detach())):
            raise DivergedError(
                f"loss: found {value} at step {trainer.step}; expected a finite number. Try to lower the learning rate"
            )
        trainer.progress.add_loss(value)
        base = trainer.plan.optimizer.learning_rate * trainer.learning_rate_factor
        self._rate = rate(base, trainer.step, trainer.total_steps)
        return Request(RequestKind.UPDATE, self._rate * weight, weight * samples)

    def _tell(self) -> None:
        trainer = self._trainer
        if trainer.progress.due(last=trainer.step == trainer.total_steps):
            norm = float(torch.linalg.vector_norm(self._flat.buffer.flat))
            share = trainer.shares[trainer.rank]
            measured = (trainer.step, trainer.total_steps, trainer.epoch, self._rate, norm, share, trainer.size)
            trainer.progress.report_step(*measured)
