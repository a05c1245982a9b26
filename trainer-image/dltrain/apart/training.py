"""Training by a parameter server without lockstep: asynchronous, or stale-synchronous within a bound. Users: ``rank``.

A worker reads the parameters, computes the gradient of its part of its next batch, and sends it; the server applies
each as it comes, and answers with the parameters once ``clocks`` allow the next step. An update's learning rate is the
schedule's at the worker's step times the worker's part of the batch: when every worker has made its step, they have
moved the parameters as far as a step in lockstep would, with any optimizer, whose state is the server's.

For a checkpoint, or to stop, the server answers everybody with a pause; the state then includes every worker's clock,
so that no sample is lost or counted twice by a run that goes on from it with the same workers.
"""

import json
import time
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dljob.contract import Role
from dltrain import randomness
from dltrain.buffers import GradientBuffer
from dltrain.checkpoint import MODEL, OPTIMIZER, STATE, Snapshot, decode
from dltrain.clocks import Clocks
from dltrain.errors import DivergedError
from dltrain.feeding.feed import Feed
from dltrain.loader import Loader
from dltrain.loop import Trainer
from dltrain.lr import rate
from dltrain.measure import Times
from dltrain.messages import EXIT_STOPPED
from dltrain.sampling import Part, Sampler
from dltrain.scaling import Scaling
from dltrain.serverlink import Asks, Link, Reply, Request, Says
from dltrain.state import capture, replicate, restore
from dltrain.writer import patience_s

LossOf = Callable[[nn.Module, Any], Tensor]
"""(model, batch) to the mean loss of the batch."""


class Flat:
    """A model's parameters and gradients, each in one piece, in main memory for messages."""

    def __init__(self, model: nn.Module) -> None:
        self.buffer = GradientBuffer(model.parameters(), 2**62, 0)
        self.values = torch.empty_like(self.buffer.gradient)
        offset = 0
        with torch.no_grad():
            for parameter in self.buffer.parameters:
                stop = offset + parameter.numel()
                self.values[offset:stop] = parameter.reshape(-1)
                parameter.data = self.values[offset:stop].view(parameter.shape)
                offset = stop
        self._room = self.values if not self.values.is_cuda else torch.empty_like(self.values, device="cpu")

    def receive(self, link: Link, peer: int, into: Tensor) -> None:
        room = into if not into.is_cuda else self._room
        link.body(room, peer)
        if room is not into:
            into.copy_(room)

    def outgoing(self, tensor: Tensor) -> Tensor:
        return self._room.copy_(tensor) if tensor.is_cuda else tensor


class Asynchronous:
    """What a worker and the server of one run have in common: state, pauses, and what ends them."""

    def __init__(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer, total: int, alive_s: float) -> None:
        plan = self.plan = trainer.plan
        self.trainer, self.model, self.optimizer = trainer, model, optimizer
        self.ranks = [rank.rank for rank in plan.ranks if rank.role is Role.WORKER]
        (self.server,) = (rank.rank for rank in plan.ranks if rank.role is Role.SERVER)
        self.flat = Flat(model)
        self.link = Link(trainer.world, trainer.progress.alive, alive_s)
        self.done = self._resume()
        trainer.total_steps = total
        self.clocks = Clocks(self.done, total, plan.staleness_bound)

    def _resume(self) -> list[int]:
        """Every worker's clock: of a checkpoint, or 0. Other workers go on from the slowest one's."""
        trainer, none = self.trainer, [0] * len(self.ranks)
        snapshot = trainer.keeper.resume(
            self.model.state_dict(), self.model.load_state_dict, self.optimizer.load_state_dict
        )
        if snapshot is None:
            return none
        trainer.progress.accuracy, trainer.progress.loss = snapshot.state["accuracy"], snapshot.state["loss"]
        clocks = snapshot.state.get("clocks")
        same = tuple(snapshot.state["planned_shares"]) == trainer.shares
        return list(clocks) if clocks and same else [snapshot.step] * len(self.ranks)

    def pause(self) -> None:
        """All ranks together: save, and stop if any was asked to."""
        trainer, world = self.trainer, self.trainer.world
        (stop,) = world.sum([float(trainer.reporter.stop.is_set())])
        self.save()
        if stop:
            self.wait_for_checkpoint()
            trainer.stopped = True
            raise SystemExit(EXIT_STOPPED)

    def save(self) -> None:
        """The server's state, on every rank; rank 0 writes it. Raises PeerLostError, OSError."""
        trainer, world = self.trainer, self.trainer.world
        if not self.plan.checkpoint.enabled:
            return
        files: dict[str, bytes] = {}
        if world.rank == self.server:
            done = self.clocks.done
            scaling = Scaling(self.plan.optimizer, self.plan.global_batch).state()
            state = {"clocks": done, "scaling": scaling}
            files = _packed(capture(min(done), self.model.state_dict(), self.optimizer.state_dict(), state))
        names = world.broadcast("\n".join(files).encode(), self.server).decode().split("\n")
        snapshot = decode({name: world.broadcast(files.get(name, b""), self.server) for name in names})
        weights: dict[str, Tensor] = {}
        optimizer: dict[str, Any] = {}
        restore(snapshot, weights.update, optimizer.update)
        rest = {
            "epoch": trainer.epoch,
            "shares": trainer.shares,
            "planned_shares": trainer.shares,
            "accuracy": trainer.progress.accuracy,
            "loss": trainer.progress.loss,
        }
        kept = {key: snapshot.state[key] for key in ("clocks", "scaling")}
        trainer.keeper.save(snapshot.step, weights, optimizer, rest | kept)

    def wait_for_checkpoint(self) -> None:
        if self.plan.checkpoint.enabled:
            nbytes = 4 * self.flat.values.nbytes
            self.trainer.busy("checkpoint", patience_s(nbytes))
            self.trainer.keeper.wait()


class Server(Asynchronous):
    """Applies updates as they come, and holds back who is too far ahead."""

    def run(self) -> None:
        """Until all workers are done. Raises SystemExit when the ranks agreed to stop, PeerLostError, DivergedError."""
        while not self._serve():
            self.pause()

    def _serve(self) -> bool:
        """Until everybody pauses (False) or is done (True)."""
        trainer, clocks = self.trainer, self.clocks
        waiting: dict[int, float] = {}
        """Workers that asked and were not answered, with the staleness of their update."""
        pausing, paused = False, 0
        self._round_began, self._rounds = time.perf_counter(), min(clocks.done)
        while paused < len(self.ranks):
            peer, request = self.link.request()
            worker = self.ranks.index(peer)
            waiting[worker] = self._take(worker, request)
            pausing = pausing or bool(request.wish) or trainer.reporter.stop.is_set()
            if pausing:
                for one in waiting:
                    self.link.send(Reply(Says.PAUSE), self.ranks[one])
                paused, waiting = paused + len(waiting), {}
                continue
            if clocks.over and len(waiting) == len(self.ranks):
                for one in waiting:
                    self._answer(one, Says.OVER, waiting[one])
                return True
            for one in [one for one in waiting if clocks.may_begin(one)]:
                self._answer(one, Says.GO_ON, waiting.pop(one))
        return False

    def _take(self, worker: int, request: Request) -> float:
        """Do what a worker asks; returns the staleness of its update."""
        if request.asks == Asks.PARAMETERS:
            return 0.0
        if request.asks == Asks.NOTHING:
            self.clocks.step(worker, updates=False)
            self._tell()
            return 0.0
        self.flat.receive(self.link, self.ranks[worker], self.flat.buffer.flat)
        if not isfinite(float(torch.linalg.vector_norm(self.flat.buffer.flat))):
            rank, step = self.ranks[worker], self.clocks.done[worker]
            raise DivergedError(f"gradient of rank {rank} is not finite at step {step}: lower the learning rate")
        for group in self.optimizer.param_groups:
            group["lr"] = request.rate
        self.optimizer.step()
        self._samples += request.samples
        staleness = self.clocks.step(worker)
        self._tell()
        return float(staleness)

    _samples = 0.0
    """Of all updates."""

    def _answer(self, worker: int, says: Says, staleness: float) -> None:
        reply = Reply(says, staleness, self.clocks.ahead(worker), self._samples)
        self.clocks.read(worker)
        self.link.send(reply, self.ranks[worker], self.flat.outgoing(self.flat.values))

    def _tell(self) -> None:
        """News whenever the slowest worker has made a step."""
        slowest, trainer = min(self.clocks.done), self.trainer
        if slowest == self._rounds:
            return
        trainer.step, self._rounds = slowest, slowest
        now = time.perf_counter()
        trainer.progress.add(Times(0.0, now - self._round_began, 0.0), self.plan.global_batch, [])
        self._round_began = now
        if trainer.progress.due(last=slowest == trainer.total_steps):
            lr = float(self.optimizer.param_groups[0]["lr"])
            trainer.progress.tell(slowest, trainer.total_steps, trainer.epoch, lr, 0.0, 0, trainer.size)


class Worker(Asynchronous):
    """Computes gradients of its part of its batches, at its own pace."""

    def run(self, loader: Loader, loss_of: LossOf, end_of_epoch: Callable[[], None]) -> None:
        """Until all workers are done. Raises SystemExit when the ranks agreed to stop, PeerLostError, DivergedError."""
        trainer, sampler = self.trainer, Sampler.planned(self.plan, loader.samples)

        def part_of(step: int) -> Part:
            return sampler.part(step, trainer.shares, trainer.rank)

        trainer.step = first = self.done[trainer.worker]
        reply = self._ask(Request(Asks.PARAMETERS))
        with Feed(loader, part_of, self.plan.seed, trainer.total_steps) as feed:
            while reply.says != Says.OVER:
                if reply.says == Says.PAUSE:
                    self.pause()
                    reply = self._ask(Request(Asks.PARAMETERS))
                    continue
                part = part_of(trainer.step)
                trainer.epoch = part.epoch
                began = time.perf_counter()
                batch = feed.take(trainer.step, part)
                randomness.seed(randomness.of_step(self.plan.seed, trainer.step, trainer.rank), trainer.device)
                fetched, waited_s, seen = time.perf_counter(), self.link.waited_s, reply.samples
                request = self._compute(batch, part.weight, part.batch, loss_of)
                computed_s = time.perf_counter() - fetched
                trainer.step += 1
                reply = self._ask(request)
                exposed_s = self.link.waited_s - waited_s
                times = Times(fetched - began, computed_s, exposed_s, fetch_s=feed.spent_s)
                # Of all workers, while this one made its step: what the job does in that time.
                samples = round(reply.samples - seen) if reply.says != Says.PAUSE else part.batch
                if trainer.step == first + 1:
                    trainer.progress.warm_up(times, samples)
                else:
                    trainer.progress.add(times, samples, [])
                if reply.says != Says.PAUSE:
                    trainer.progress.apart(reply.staleness, reply.ahead)
                self._tell()
                if part.last:
                    trainer.progress.end_epoch()
                    end_of_epoch()

    def _ask(self, request: Request) -> Reply:
        """The server's answer, with its parameters in the model's place."""
        trainer = self.trainer
        # Not before a step: there would be nothing new to save.
        wish = trainer.reporter.stop.is_set() or (trainer.keeper.due and request.asks != Asks.PARAMETERS)
        gradient = self.flat.outgoing(self.flat.buffer.flat) if request.asks == Asks.UPDATE else None
        self.link.send(request._replace(wish=float(wish)), self.server, gradient)
        reply = self.link.reply(self.server)
        if reply.says != Says.PAUSE:
            self.flat.receive(self.link, self.server, self.flat.values)
        return reply

    def _compute(self, batch: Any, weight: float, samples: int, loss_of: LossOf) -> Request:
        """The gradient of a part of a batch, into the buffer."""
        if not weight:
            return Request(Asks.NOTHING)
        self.flat.buffer.attach()
        loss = loss_of(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for index in range(len(self.flat.buffer.parameters)):
            self.flat.buffer.adopt(index)
        if not isfinite(value := float(loss.detach())):
            raise DivergedError(f"loss is {value} at step {self.trainer.step}: lower the learning rate")
        self.trainer.progress.add_loss(value)
        base = self.plan.optimizer.learning_rate * self.trainer.learning_rate_factor
        self._rate = rate(base, self.trainer.step, self.trainer.total_steps)
        return Request(Asks.UPDATE, self._rate * weight, weight * samples)

    _rate = 0.0
    """At the last step, for lockstep's whole batch."""

    def _tell(self) -> None:
        trainer = self.trainer
        if trainer.progress.due(last=trainer.step == trainer.total_steps):
            norm = float(torch.linalg.vector_norm(self.flat.buffer.flat))
            share = trainer.shares[trainer.rank]
            told = (trainer.step, trainer.total_steps, trainer.epoch, self._rate, norm, share, trainer.size)
            trainer.progress.tell(*told)


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
    made: Server | Worker
    if trainer.plan.ranks[trainer.rank].role is Role.SERVER:
        made = Server(trainer, model, optimizer, total, alive_s)
        made.run()
    else:
        made = Worker(trainer, model, optimizer, total, alive_s)
        made.run(loader, loss_of, end_of_epoch)
    trainer.step = trainer.total_steps
    made.save()
    made.wait_for_checkpoint()


def _packed(snapshot: Snapshot) -> dict[str, bytes]:
    """As ``checkpoint.decode`` takes it."""
    from safetensors.torch import save

    state = json.dumps({"step": snapshot.step} | snapshot.state).encode()
    return {MODEL: save(snapshot.model), OPTIMIZER: save(snapshot.optimizer), STATE: state}
