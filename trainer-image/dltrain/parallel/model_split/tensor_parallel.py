"""Tensor parallelism: pairs of linear layers are split, and each rank computes a part of the units between the layers.

A unit is a feature or an attention head. The first layer of a pair is split by its outputs (columns of the matrix in
papers) and the second layer by its inputs, so ranks exchange nothing between the two layers. There is one all-reduce
after the second layer in the forward pass, and one before the first layer in the backward pass (Shoeybi et al. 2019,
section 3). Every rank has all other layers.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.optim import Optimizer

from dlcontract import Plan
from dltrain.batch.shares import apportion
from dltrain.comm.core.collective import Collective
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.selection import choose
from dltrain.models.layers import Pair, pairs_of
from dltrain.parallel.model_split.model_parallel import Cut, Held, ModelParallel
from dltrain.parallel.model_split.replicas import Replicas
from dltrain.protocol.errors import BadInputError


class ActivationAllReduce:
    """All-reduce of activations over the ranks of a replica with the plan's collective.

    There is one buffer for each size and dtype. The backward pass uses it for the gradients of activations, too.
    """

    def __init__(self, plan: Plan, replicas: Replicas, on_time: Callable[[float], None]) -> None:
        """Prepare the all-reduce. ``on_time``: called with the duration of each all-reduce in seconds."""
        self._plan, self._replicas, self._on_time = plan, replicas, on_time
        self._by_size: dict[tuple[int, torch.dtype], Collective] = {}

    def __call__(self, part: Tensor) -> Tensor:
        """Return the sum of ``part`` over ranks in a new tensor, bit-identical on all ranks.

        Raise PeerLostError if a rank is lost.
        """
        began = time.perf_counter()
        key = (part.numel(), part.dtype)
        if key not in self._by_size:
            room = torch.empty(part.numel(), dtype=part.dtype, device=part.device)
            plan = self._plan
            self._by_size[key] = choose(
                plan.collective,
                self._replicas.own.comm,
                [room],
                segment_nbytes=plan.segment_nbytes,
                host=self._replicas.host,
            )
        collective = self._by_size[key]
        (room,) = collective.buffers
        room.copy_(part.reshape(-1))
        collective.allreduce(0)
        total = room.clone().view(part.shape)
        self._on_time(time.perf_counter() - began)
        return total

    def abandon(self) -> None:
        for collective in self._by_size.values():
            collective.abandon()

    def close(self) -> None:
        for collective in self._by_size.values():
            collective.close()


class _Enter(torch.autograd.Function):
    """Function before the first linear layer of a pair: identity in the forward pass, all-reduce in the backward pass.

    Each rank has the gradient of the pair's input from its own units only, so these gradients must be added.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, summing: ActivationAllReduce) -> Tensor:
        ctx.summing = summing
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.summing(gradients[0]), None


class _Leave(torch.autograd.Function):
    """Function after the second linear layer of a pair: all-reduce in the forward pass, identity in the backward pass.

    Each rank has the contribution of its own units to the pair's output, so these contributions must be added.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, summing: ActivationAllReduce) -> Tensor:
        return summing(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def units_of(pair: Pair, rank: int, ranks: int) -> range:
    """Return the indices of the units that ``rank`` computes, of ``ranks`` ranks with equal parts.

    ``pair``: two linear layers that are split together. The units are the attention heads or the hidden features
    between them.
    """
    counts = apportion(pair.units, [1] * ranks)
    return range(sum(counts[:rank]), sum(counts[: rank + 1]))


def cuts_of(model: nn.Module, pairs: Sequence[Pair], rank: int, ranks: int) -> Held:
    """Return the part of each parameter that ``rank`` has, by the parameter's name; None: the whole parameter.

    Parameters of a pair of linear layers are cut, so that a rank has those of its units (attention heads or hidden
    features). The bias of a pair's second layer and all other parameters are whole on every rank.
    """
    held: dict[str, Cut | None] = {name: None for name, _ in model.named_parameters()}
    for pair in pairs:
        units, width = units_of(pair, rank, ranks), _linear(model, pair.second).in_features // pair.units
        columns = torch.arange(units.start * width, units.stop * width, device="cpu")
        rows = torch.cat([block * pair.units * width + columns for block in range(pair.blocks)])
        for first in pair.firsts:
            held[f"{first}.weight"] = Cut(0, rows)
            if f"{first}.bias" in held:
                held[f"{first}.bias"] = Cut(0, rows)
        held[f"{pair.second}.weight"] = Cut(1, columns)
    return held


class TensorParallel(ModelParallel):
    """Tensor parallelism: every rank of a replica processes all its samples with a part of the model.

    A rank has some attention heads or hidden features of each pair of linear layers, and all other layers.
    """

    def __init__(
        self,
        plan: Plan,
        process_group: ProcessGroup,
        model: nn.Module,
        optimizer: Optimizer,
        tail: int,
        device: torch.device,
    ) -> None:
        """Split the model.

        Raise BadInputError if the model has no pair of linear layers, or a pair with fewer units than ranks. ``tail``:
        number of values that ranks share at every step. ``device``: this rank's torch device.
        """
        pairs, replicas = pairs_of(model), Replicas(plan, process_group)
        units, parts = min((pair.units for pair in pairs), default=0), replicas.parts
        if units < parts:
            raise BadInputError(
                "spec.parallelism.strategy",
                f"Tensor on {parts} ranks, with a pair of linear layers of {units} units"
                if pairs
                else "Tensor, with a model without a pair of linear layers",
                f"pairs of linear layers with at least {parts} hidden units, one for each rank",
                "choose another strategy, fewer nodes, or more spec.parallelism.replicas"
                if pairs
                else "choose another model or strategy",
            )
        whole = {part: cuts_of(model, pairs, part, parts) for part in range(parts)}
        # Collectives add the numbers of a bucket in an order that depends on their place in it. All ranks must get the
        # same bits for parameters that they have whole. With parts of different sizes, only buckets of a parameter each
        # have equal places on all ranks.
        uneven = any(pair.units % parts for pair in pairs)
        bucket_nbytes = 1 if uneven else plan.bucket_nbytes
        super().__init__(model, optimizer, replicas, whole.__getitem__, tail, bucket_nbytes, device)
        self._summing = ActivationAllReduce(plan, replicas, self._wait)
        for pair in pairs:
            firsts = [_linear(model, first) for first in pair.firsts]
            _summed(firsts, _linear(model, pair.second), self._summing)

    def replicated(self, model: nn.Module) -> list[Tensor]:
        return [own for name, own in self._own.items() if self._held[name] is None]

    def abandon(self) -> None:
        super().abandon()
        self._summing.abandon()

    def close(self) -> None:
        self._summing.close()
        super().close()


def _linear(model: nn.Module, name: str) -> nn.Linear:
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear), "pairs are of linear layers"
    return found


def _summed(firsts: Sequence[nn.Linear], second: nn.Linear, summing: ActivationAllReduce) -> None:
    """Add the all-reduces of a pair: before the layers ``firsts``, and after the layer ``second``."""
    for first in firsts:
        first.register_forward_pre_hook(lambda _, args: (_Enter.apply(args[0], summing),))  # type: ignore[no-untyped-call]
    second.forward = _row(second, summing)  # type: ignore[method-assign, assignment]


def _row(layer: nn.Linear, summing: ActivationAllReduce) -> Callable[[Tensor], Tensor]:
    """Return the forward function of the second layer of a pair. It adds the bias only once, after the all-reduce."""

    def forward(x: Tensor) -> Tensor:
        total: Tensor = _Leave.apply(linear(x, layer.weight), summing)  # type: ignore[no-untyped-call]
        return total if layer.bias is None else total + layer.bias

    return forward
