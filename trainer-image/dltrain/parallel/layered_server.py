"""Layered parameter server: rank 0 owns the parameters and the optimizer state, and does not train.

In each step, rank 0 gathers one parameter tensor's gradients after another, as the backward pass of the workers reaches
them. The gradients are weighted by local batch sizes, so their sum is the average over the global batch. Rank 0 updates
the parameters and broadcasts all of them in one buffer, so that workers begin the next step with equal parameters.

A script or scheduler changes learning rates on the workers. The first worker therefore sends the options of its
parameter groups to rank 0 in each step. Loss, stop requests and times travel at the end of the last gather, and rank 0
sends their sums back.
"""

import io
import time
from collections.abc import Collection, Iterable
from math import inf, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlcontract import Plan
from dltrain.comm.core.collective import Collective
from dltrain.comm.core.fault_tolerance import duplicate
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.schedules.layered_server import LayeredBroadcast, LayeredGather
from dltrain.optim.options import load_state
from dltrain.parallel.data_parallel import DataParallel
from dltrain.parallel.gradient_buffer import square_of
from dltrain.protocol.errors import BadInputError, MisuseError

SERVER, FIRST_WORKER = 0, 1


class LayeredServer(DataParallel):
    """Data parallelism in which only rank 0 gets the summed gradients. It updates the parameters of all ranks."""

    sharded = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Optimizer,
        process_group: ProcessGroup,
        segment_nbytes: int,
        tail: int,
    ) -> None:
        """Move the parameters into one buffer. Gradients stay in a buffer with one bucket per parameter tensor.

        ``segment_nbytes``: maximum size of a message. ``tail``: number of
        values that ranks share at every step. Raise ValueError for an optimizer with state.
        """
        if optimizer.state:
            raise ValueError("optimizer: found state; expected none, because t.wrap loads it. Create a new optimizer")
        comm = process_group.comm

        def collective(buffers: list[Tensor]) -> Collective:
            return LayeredGather(duplicate(comm), buffers, segment_nbytes, tail)

        super().__init__(parameters, collective, 1, tail)
        if self.buffer.wide_tail:
            found = f"parameters of {self.buffer.flat.dtype}"
            raise BadInputError("spec.collective", f"LayeredServer with {found}", "float32", "choose Ring")
        self._process_group, self._optimizer = process_group, optimizer
        self._serves = process_group.rank == SERVER
        values = torch.empty_like(self.buffer.gradient)
        offset = 0
        with torch.no_grad():
            for parameter in self.buffer.parameters:
                part = values[offset : offset + parameter.numel()].view(parameter.shape)
                part.copy_(parameter)
                parameter.data = part
                offset += parameter.numel()
        self._broadcast = LayeredBroadcast(duplicate(comm), [values], segment_nbytes)

    def clip(self, max_norm: float) -> float:
        raise MisuseError(
            "t.clip_gradients: found collective LayeredServer, with which only the server has the summed gradient; "
            "expected another collective. Set spec.collective to Auto"
        )

    def finish(self) -> list[float]:
        """Wait until rank 0 has the sums of all gradients. Return the tail (values after the gradients), summed.

        Afterwards, parameters of workers have no gradient, so that their optimizers update nothing.
        """
        shared = super().finish()
        self._exchange_options()
        if self._serves:
            self.square = square_of([self.buffer.gradient])
        else:
            self._norm = float(torch.linalg.vector_norm(self.buffer.gradient))
            for parameter in self.buffer.parameters:
                parameter.grad = None
        return shared

    def _exchange_options(self) -> None:
        """Copy the options of the first worker's parameter groups, such as learning rates, to the server."""
        options = np.array([value for group in self._optimizer.param_groups for value in _numbers(group)])
        self._process_group.broadcast_into(options.view(np.uint8), FIRST_WORKER)
        if self._serves:
            values = iter(options.tolist())
            for group in self._optimizer.param_groups:
                _set_numbers(group, values)

    def gradient_norm(self) -> float:
        """Return the norm of this rank's gradient: of the global batch on the server, and of its part on a worker.

        Workers learn the norm of the global batch in the next step. The norm is not finite if a gradient is not finite.
        """
        if self._serves:
            return sqrt(self.square) if self.square < inf else self.square
        return super().gradient_norm()

    def spread(self) -> None:
        """Broadcast the parameters that rank 0 has updated. Raise PeerLostError if a rank is lost."""
        began = time.perf_counter()
        self._broadcast.allreduce(0)
        self.exposed_s += time.perf_counter() - began

    def any_rank(self, found: bool) -> bool:
        return self._process_group.sum([float(found)])[0] > 0

    def weights(self, model: nn.Module, left_out: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the model's tensors. Buffers such as running statistics are those of the first worker.

        All ranks must call this together. Raise PeerLostError if a rank is lost.
        """
        with torch.no_grad():
            for buffer in model.buffers():
                copy = buffer.detach().clone().reshape(-1)
                self._process_group.broadcast_into(copy.view(torch.uint8).numpy(), FIRST_WORKER)
                if self._serves:
                    buffer.copy_(copy.view(buffer.shape))
        return super().weights(model, left_out)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the server's ``state_dict()`` on every rank, because each pod may keep a copy of a checkpoint."""
        written = io.BytesIO()
        if self._serves:
            torch.save(optimizer.state_dict(), written)
        read = self._process_group.broadcast(written.getvalue(), SERVER)
        return optimizer.state_dict() if self._serves else torch.load(io.BytesIO(read), weights_only=True)

    def load_optimizer(self, optimizer: Optimizer, parts: dict[str, Any]) -> None:
        """Load the optimizer's state from a checkpoint. Workers load only the options of the parameter groups."""
        load_state(optimizer, parts if self._serves else parts | {"state": {}})

    def abandon(self) -> None:
        super().abandon()
        self._broadcast.abandon()

    def close(self) -> None:
        self._broadcast.close()
        super().close()


def layered_server(
    plan: Plan, process_group: ProcessGroup, model: nn.Module, optimizer: Optimizer, tail: int
) -> LayeredServer:
    """Return the strategy of a plan with the collective LayeredServer on several ranks.

    ``tail``: number of values that ranks share at every step. Raise BadInputError for a model on a GPU.
    """
    if any(parameter.is_cuda for parameter in model.parameters()):
        raise BadInputError("spec.collective", "LayeredServer with a model on a GPU", "ranks on CPUs", "choose Auto")
    return LayeredServer(model.parameters(), optimizer, process_group, plan.segment_nbytes, tail)


def _numbers(group: dict[str, Any]) -> list[float]:
    """Return the numbers among the options of a parameter group, in the order of their names."""
    found: list[float] = []
    for name in _numeric(group):
        value = group[name]
        found += [float(part) for part in value] if isinstance(value, tuple) else [float(value)]
    return found


def _set_numbers(group: dict[str, Any], values: Any) -> None:
    """Set the options that ``_numbers`` returns. ``values``: iterator over them."""
    for name in _numeric(group):
        old = group[name]
        group[name] = tuple(next(values) for _ in old) if isinstance(old, tuple) else next(values)


def _numeric(group: dict[str, Any]) -> list[str]:
    def numeric(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return sorted(
        name
        for name, value in group.items()
        if numeric(value) or (isinstance(value, tuple) and value and all(map(numeric, value)))
    )
