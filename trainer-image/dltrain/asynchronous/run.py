"""Common state of workers and parameter server: parameters, clocks, pauses and checkpoints.

Before a checkpoint or a stop, the server tells every worker to pause when the worker sends its next request. The saved
state includes every worker's clock, so that no sample is lost or counted twice when a run with the same workers
resumes.
"""

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlcontract import Role
from dltrain.asynchronous.clocks import Clocks
from dltrain.asynchronous.link import Link
from dltrain.checkpoint.state import capture, restore
from dltrain.checkpoint.store import MODEL, OPTIMIZER, STATE, Snapshot
from dltrain.checkpoint.writer import patience_s
from dltrain.optim.lr_scaling import Scaling
from dltrain.parallel.gradient_buffer import GradientBuffer
from dltrain.parallel.placement import Placement
from dltrain.protocol.rank_messages import EXIT_STOPPED
from dltrain.train.saving import LoadingTarget
from dltrain.train.trainer import Trainer


class Flat:
    """A model's parameters (``values``) and its gradients (``buffer``), each in one contiguous tensor.

    The constructor turns the model's parameters into views of ``values``, so that a change of ``values`` changes the
    model. On a GPU, messages go through a buffer in main memory.
    """

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
        on_gpu = self.values.is_cuda
        self._room = torch.empty_like(self.values, device="cpu", pin_memory=True) if on_gpu else self.values

    def receive(self, link: Link, peer: int, into: Tensor) -> None:
        room = into if not into.is_cuda else self._room
        link.body(room, peer)
        if room is not into:
            into.copy_(room)

    def outgoing(self, tensor: Tensor) -> Tensor:
        return self._room.copy_(tensor) if tensor.is_cuda else tensor


class Run:
    """The state of one rank, a worker or the parameter server, in asynchronous training.

    Its methods save checkpoints and stop the run. All ranks must call them together, during a pause between steps.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer, total: int, alive_s: float) -> None:
        plan = self.plan = trainer.plan
        self.trainer, self.model, self.optimizer = trainer, model, optimizer
        self.ranks = [rank.rank for rank in plan.ranks if rank.role is Role.WORKER]
        (self.server,) = (rank.rank for rank in plan.ranks if rank.role is Role.SERVER)
        self.flat = Flat(model)
        self.link = Link(trainer.process_group, trainer.progress.alive, alive_s)
        self.done = self._resume()
        trainer.total_steps = total
        self.clocks = Clocks(self.done, total, plan.staleness_bound)

    def _resume(self) -> list[int]:
        """Restore the newest checkpoint, if any. Return the number of completed steps of each worker.

        Without a checkpoint, the numbers are 0. If the local batch sizes differ from those in the checkpoint, as after
        a change of workers, every worker continues from the step of the slowest one.
        """
        trainer, none = self.trainer, [0] * len(self.ranks)
        snapshot = trainer.checkpoint_manager.resume(
            self.model.state_dict(), LoadingTarget(Placement(), self.model, self.optimizer)
        )
        if snapshot is None:
            return none
        trainer.progress.accuracy, trainer.progress.loss = snapshot.state["accuracy"], snapshot.state["loss"]
        clocks = snapshot.state.get("clocks")
        same = tuple(snapshot.state["planned_shares"]) == trainer.shares
        return list(clocks) if clocks and same else [snapshot.step] * len(self.ranks)

    def pause(self) -> None:
        """Save a checkpoint together with all ranks. Raise SystemExit if any rank was asked to stop.

        If the ranks stop and the checkpoint cannot be complete on the volume before the first rank is killed, save it
        to the pods' memory only.
        """
        trainer, process_group = self.trainer, self.trainer.process_group
        left_s = trainer.reporter.grace_left_s
        (stop,) = process_group.sum([float(trainer.reporter.stop.is_set())])
        durable = not stop or not self.plan.checkpoint.enabled or trainer.checkpoint_manager.fits(left_s)
        self.save(durable=durable)
        if not durable:
            trainer.checkpoint_manager.report_skipped(min(self.clocks.done))
        if stop:
            self.wait_for_checkpoint()
            trainer.stopped = True
            raise SystemExit(EXIT_STOPPED)

    def save(self, *, durable: bool = True) -> None:
        """Send the server's state to every rank and start a checkpoint of it on rank 0. All ranks must call it.

        If checkpoints are disabled, do nothing. ``durable``: False to copy the state to the pods' memory only. Raise
        PeerLostError if a rank is lost, and OSError if writing the previous checkpoint failed.
        """
        trainer, process_group = self.trainer, self.trainer.process_group
        if not self.plan.checkpoint.enabled:
            return
        files: dict[str, bytes] = {}
        if process_group.rank == self.server:
            done = self.clocks.done
            scaling = Scaling(self.plan.optimizer, self.plan.global_batch).state()
            state = {"clocks": done, "scaling": scaling}
            files = _packed(capture(min(done), self.model.state_dict(), self.optimizer.state_dict(), state))
        names = process_group.broadcast("\n".join(files).encode(), self.server).decode().split("\n")
        snapshot = _unpacked({name: process_group.broadcast(files.get(name, b""), self.server) for name in names})
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
        trainer.checkpoint_manager.save(snapshot.step, weights, optimizer, rest | kept, durable=durable)

    def wait_for_checkpoint(self) -> None:
        if self.plan.checkpoint.enabled:
            nbytes = 4 * self.flat.values.nbytes
            self.trainer.busy("checkpoint", patience_s(nbytes))
            self.trainer.checkpoint_manager.wait()


def _packed(snapshot: Snapshot) -> dict[str, bytes]:
    """Encode a snapshot as files (name → content), which ``_unpacked`` decodes."""
    from safetensors.torch import save

    state = json.dumps({"step": snapshot.step} | snapshot.state).encode()
    return {MODEL: save(snapshot.model), OPTIMIZER: save(snapshot.optimizer), STATE: state}


def _unpacked(files: dict[str, bytes]) -> Snapshot:
    from safetensors.torch import load

    state = json.loads(files[STATE])
    return Snapshot(state.pop("step"), load(files[MODEL]), load(files[OPTIMIZER]), state)
