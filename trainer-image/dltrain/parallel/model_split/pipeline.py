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
from dltrain.protocol.errors import BadInputError, MisuseError

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
        self,
        plan: Plan,
        process_group: ProcessGroup,
        model: nn.Module,
        optimizer: Optimizer,
        sample: Tensor,
        tail: int,
        device: torch.device,
    ) -> None:
        """Split the model into stages by the cost of its layers. ``sample``: an input with batch size 1.

        Raise BadInputError if there are more stages than layers with parameters, and MisuseError if the model does not
        say what its layers are, or if they cannot be pipeline stages. ``tail``: number of values that ranks share at
        every step.
        """
        known, replicas = costs(model, sample), Replicas(plan, process_group)
        try:
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

        self._device, self._shape = device, tuple(sample.shape[1:])
        super().__init__(model, optimizer, replicas, held_by, tail, plan.bucket_nbytes, device)
        self.stage, self.stages, self.micro_batches = replicas.part, replicas.parts, plan.micro_batches
        self._layers = layers[self.begins[self.stage] : ends[self.stage]]
        before = known[self.begins[self.stage] - 1]
        self._shape_in, self._dtype_in = before.output, before.dtype
        self._neighbours = Neighbours(duplicate(replicas.own.comm), plan.segment_nbytes, self._wait)
        self._tied = self._ties(held_by)
        self._guard = model.register_forward_pre_hook(_refuse)

    def _ties(self, held_by: Callable[[int], Held]) -> list[tuple[nn.Parameter, MpiAllreduce]]:
        """Return (parameter, all-reduce for its gradient) for each parameter of this stage that other stages have, too.

        Such parameters are tied weights. All stages must call this method together. ``held_by``: returns the parts of
        parameters that a rank has.
        """
        found = []
        held = [held_by(stage) for stage in range(self.stages)]
        trained = self._trained
        for name in self.shapes:
            holders = [stage for stage in range(self.stages) if name in held[stage]]
            if len(holders) > 1 and name in trained:
                comm = self.replicas.own.comm.Split(int(self.stage in holders), self.stage)
                if self.stage in holders:
                    own = self._own[name]
                    found.append((own, MpiAllreduce(comm, [torch.empty(own.numel(), dtype=own.dtype, device="cpu")])))
        return found

    def run(
        self, x: Tensor, y: Tensor, loss_of: LossOf, log: Callable[[Tensor], object] = lambda loss: None
    ) -> Tensor | None:
        """Run the forward and backward passes of a batch in micro-batches, together with all other stages.

        ``log``: called on the last stage with the batch's mean loss, before the last backward pass.

        Return the batch's mean loss on the last stage, and None on other stages. Only the first stage uses the content
        of the inputs ``x``, and only the last stage uses the content of the targets ``y``. Raise PeerLostError if
        a rank is lost, and MisuseError for inputs of other shapes than the sample.
        """
        self._check_inputs("t.run", x)
        if not isinstance(y, Tensor) or not y.dim() or len(y) != len(x):
            found = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise MisuseError(
                f"t.run: targets: found {found}; expected a tensor with a row for each of {len(x)} samples"
            )
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
                if i == len(parts) - 1:
                    log(total)
                continue
            out, begin = outs.pop(i), ins.pop(i)
            gradient = None
            if self.stage < self.stages - 1:
                room = torch.empty(out.shape, dtype=out.dtype, device="cpu")
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
        self._check_inputs("t.predict", x)
        out = self._forward(self._input(x).detach())
        if self.stage == self.stages - 1:
            return out
        self._neighbours.send(out, self.stage + 1)
        self._neighbours.settle()
        return None

    def _check_inputs(self, call: str, x: Any) -> None:
        """Raise MisuseError unless ``x`` has the shape of the sample, from which stages know activations."""
        if not isinstance(x, Tensor) or tuple(x.shape[1:]) != self._shape:
            found = f"samples of shape {tuple(x.shape[1:])}" if isinstance(x, Tensor) else type(x).__name__
            raise MisuseError(
                f"{call}: inputs: found {found} with parallelism.strategy Pipeline; expected a tensor with samples of "
                f"shape {self._shape}, as the sample of t.wrap. Pad all samples to this shape"
            )

    def _input(self, x: Tensor) -> Tensor:
        """Return the input of this stage for the samples ``x``.

        On the first stage, this is ``x`` itself. Other stages receive the activations of the previous stage.
        """
        if not self.stage:
            return x
        room = torch.empty((len(x), *self._shape_in), dtype=self._dtype_in, device="cpu")
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

    def close(self) -> None:
        self._guard.remove()
        super().close()

    def abandon(self) -> None:
        super().abandon()
        revoke(self._neighbours.comm)
        for _, tie in self._tied:
            tie.abandon()


def _refuse(model: nn.Module, _: Any) -> None:
    """Raise MisuseError: the script has called the model, of which this rank has a stage only."""
    raise MisuseError(
        f"model: found a call of {type(model).__name__} with parallelism.strategy Pipeline, in which no rank has all "
        "of it; expected t.run(model, x, y, loss) in the loop over t.steps, and t.predict(model, x) in evaluations"
    )
