"""Pipeline parallelism: rank s of a replica has stage s of the model, and micro-batches pass from stage to stage.

Each rank sends activations to the next rank and gradients to the previous one. Both go through main memory, because the
MPI of the trainer image cannot read GPU memory. Messages are divided into segments so small that MPI sends them
without a handshake, while the sender computes.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlcontract import Plan
from dltrain.comm.algorithms.mpi_allreduce import MpiAllreduce
from dltrain.comm.core.collective import host_array
from dltrain.comm.core.fault_tolerance import duplicate, revoke, translate
from dltrain.comm.core.waiting import complete, wait_until
from dltrain.comm.process_group import ProcessGroup
from dltrain.models.layers import layers_of
from dltrain.parallel.model_split.model_parallel import Held, ModelParallel
from dltrain.parallel.model_split.pipeline_stages import costs, cut, sizes, turns
from dltrain.parallel.model_split.replicas import Replicas
from dltrain.protocol.errors import BadInputError

LossOf = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the mean loss for (outputs, targets)."""


class Neighbours:
    """Send tensors to the previous and the next pipeline stage and receive theirs, through main memory."""

    def __init__(self, comm: Any, segment_nbytes: int, waited: Callable[[float], None]) -> None:
        """Store the arguments; nothing is sent yet.

        ``comm``: an MPI communicator that nothing else uses. ``segment_nbytes``: maximum size of a message.
        ``waited``: called with the seconds of each wait for another rank.
        """
        self.comm, self._segment_nbytes, self._waited = comm, segment_nbytes, waited
        self._sending: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, peer: int) -> None:
        """Start to send ``tensor`` to the rank ``peer``. Do not change it until ``settle`` has returned."""
        from mpi4py import MPI

        host = tensor.detach().cpu().contiguous()
        try:
            for part in self._parts(host):
                self._sending.append((self.comm.Isend(part, peer), host))
        except MPI.Exception as error:
            raise translate(error) from error
        self.progress()

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Receive data from the rank ``peer`` into ``tensor``, which must be in main memory."""
        from mpi4py import MPI

        began = time.perf_counter()
        try:
            requests = [self.comm.Irecv(part, peer) for part in self._parts(tensor)]
            wait_until(lambda: complete(requests))
        except MPI.Exception as error:
            raise translate(error) from error
        self._waited(time.perf_counter() - began)

    def progress(self) -> None:
        """Make progress on pending messages. MPI makes progress only inside calls."""
        from mpi4py import MPI

        try:
            while self._sending and self._sending[0][0].Test():
                del self._sending[0]
        except MPI.Exception as error:
            raise translate(error) from error

    def settle(self) -> None:
        """Wait until all messages are sent."""

        def gone() -> bool:
            self.progress()
            return not self._sending

        began = time.perf_counter()
        wait_until(gone)
        self._waited(time.perf_counter() - began)

    def _parts(self, tensor: Tensor) -> list[Any]:
        flat, longest = host_array(tensor.reshape(-1)), max(1, self._segment_nbytes // tensor.itemsize)
        return [flat[begin : begin + longest] for begin in range(0, len(flat), longest)]


class Pipeline(ModelParallel):
    """One pipeline stage. ``run`` processes a batch forward and backward, together with all other stages."""

    sums_in_backward = False  # a stage first sends the gradient of its input to the stage before

    def __init__(
        self, plan: Plan, process_group: ProcessGroup, model: nn.Module, optimizer: Optimizer, sample: Tensor, tail: int
    ):
        """Split the model into stages by the cost of its layers. ``sample``: an input with batch size 1.

        Raise BadInputError if there are more stages than layers with parameters. ``tail``: number of values that ranks
        share at every step.
        """
        replicas = Replicas(plan, process_group)
        try:
            known = costs(model, sample)
            self.begins = cut(known, replicas.parts)
        except ValueError as error:
            expected = f"a model that can be split into this many stages ({error})"
            remedy = "use fewer stages"
            raise BadInputError("spec.parallelism.stages", str(replicas.parts), expected, remedy) from None
        layers = layers_of(model)
        ends = [*self.begins[1:], len(layers)]
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

        def held_by(stage: int) -> Held:
            part = layers[self.begins[stage] : ends[stage]]
            return {names[parameter]: None for layer in part for parameter in layer.parameters}

        self._dtype, self._device = next(model.parameters()).dtype, sample.device
        super().__init__(model, optimizer, replicas, held_by, tail, plan.bucket_nbytes, self._device)
        self.stage, self.stages, self.micro_batches = replicas.part, replicas.parts, plan.micro_batches
        self._layers = layers[self.begins[self.stage] : ends[self.stage]]
        self._shape_in = known[self.begins[self.stage] - 1].output if self.stage else ()
        self._neighbours = Neighbours(duplicate(replicas.own.comm), plan.segment_nbytes, self._wait)
        self._tied = self._ties(held_by)

    def _ties(self, held_by: Callable[[int], Held]) -> list[tuple[nn.Parameter, MpiAllreduce]]:
        """Return (parameter, all-reduce for its gradient) for each parameter of this stage that other stages have, too.

        Such parameters are tied weights. All stages must call this method together. ``held_by``: returns the parts of
        parameters that a rank has.
        """
        found = []
        held = [held_by(stage) for stage in range(self.stages)]
        for name in self.shapes:
            holders = [stage for stage in range(self.stages) if name in held[stage]]
            if len(holders) > 1:
                comm = self.replicas.own.comm.Split(int(self.stage in holders), self.stage)
                if self.stage in holders:
                    room = torch.empty(self._own[name].numel(), dtype=self._dtype)
                    found.append((self._own[name], MpiAllreduce(comm, [room])))
        return found

    def run(self, x: Tensor, y: Tensor, loss_of: LossOf) -> Tensor | None:
        """Run the forward and backward passes of a batch in micro-batches, together with all other stages.

        Return the batch's mean loss on the last stage, and None on other stages. Only the first stage uses the content
        of the inputs ``x``, and only the last stage uses the content of the targets ``y``. Raise PeerLostError if
        a rank is lost.
        """
        parts = sizes(len(y), self.micro_batches)
        xs, ys = torch.split(x, list(parts)), torch.split(y, list(parts))
        ins: dict[int, Tensor] = {}
        outs: dict[int, Tensor] = {}
        total: Tensor | None = None
        for kind, i in turns(self.stage, self.stages, len(parts)):
            if kind == "forward":
                ins[i] = self._input(xs[i])
                outs[i] = self._forward(ins[i])
                if self.stage < self.stages - 1:
                    self._neighbours.send(outs[i], self.stage + 1)
                    continue
                outs[i] = loss_of(outs[i], ys[i]) * (parts[i] / len(y))
                total = outs[i].detach() + (total if total is not None else 0)
                continue
            out, begin = outs.pop(i), ins.pop(i)
            gradient = None
            if self.stage < self.stages - 1:
                room = torch.empty(out.shape, dtype=out.dtype)
                self._neighbours.receive(room, self.stage + 1)
                gradient = room.to(self._device)
            with nullcontext() if i == len(parts) - 1 else self.accumulating():
                torch.autograd.backward(out, gradient)
            if self.stage:
                assert begin.grad is not None, "the stage's input requires a gradient"
                self._neighbours.send(begin.grad, self.stage - 1)
        self._neighbours.settle()
        return total

    def predict(self, model: nn.Module, x: Tensor) -> Tensor | None:
        """Return the model's outputs on the last stage, and None on others. Raise PeerLostError if a rank is lost."""
        out = self._forward(self._input(x).detach())
        if self.stage == self.stages - 1:
            return out
        self._neighbours.send(out, self.stage + 1)
        self._neighbours.settle()
        return None

    def _input(self, x: Tensor) -> Tensor:
        """Return the input of this stage for the samples ``x``.

        On the first stage, this is ``x`` itself. Other stages receive the activations of the previous stage.
        """
        if not self.stage:
            return x
        room = torch.empty((len(x), *self._shape_in), dtype=self._dtype)
        self._neighbours.receive(room, self.stage - 1)
        return room.to(self._device).requires_grad_()

    def _forward(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer.run(x)
            self._neighbours.progress()
        return x

    def complete_gradients(self) -> None:
        for parameter, tie in self._tied:
            assert parameter.grad is not None
            tie.buffers[0].copy_(parameter.grad.reshape(-1))
            tie.allreduce(0)
            parameter.grad.copy_(tie.buffers[0].view(parameter.shape))

    def abandon(self) -> None:
        super().abandon()
        revoke(self._neighbours.comm)
        for _, tie in self._tied:
            tie.abandon()
