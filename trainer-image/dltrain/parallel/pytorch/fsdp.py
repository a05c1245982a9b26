"""Fully sharded data parallelism (ZeRO-3) by PyTorch's ``fully_shard``, for any split of the global batch over ranks.

Each rank stores a part of every parameter, of its gradient and of its optimizer state. The layers are gathered one
after another for the forward and the backward pass (Zhao et al. 2023, arXiv 2304.11277). By default, fully_shard
divides the sum of the gradients by the number of ranks. Here, the gradients of rank r are multiplied by b_r / B, its
fraction of the global batch, and summed (``sharded_units``).

The parameters of the model and of the optimizer become DTensors, whose operations (such as the norm of torch's
``clip_grad_norm_``) cover all ranks. Every backward pass reduces gradients, also those of micro-batches, because no
rank has room for all gradients. In each step, exactly one backward pass completes them. Others must be inside
``accumulating`` or in earlier micro-batches. Each forward pass needs all ranks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dlcontract import Plan
from dltrain.comm.algorithms.torch_distributed import TorchDistributed, raise_lost
from dltrain.comm.core.fault_tolerance import duplicate
from dltrain.comm.process_group import ProcessGroup
from dltrain.device.precision import TYPES
from dltrain.models.deferred import forget_initial_values
from dltrain.models.sharding_units import UNIT_NBYTES
from dltrain.parallel import gradient_checks
from dltrain.parallel.gradient_buffer import square_of
from dltrain.parallel.model_split.deferred_values import receiver, without_weak_references
from dltrain.parallel.placement import OwnRows, Strategy
from dltrain.parallel.pytorch import sharded_state
from dltrain.parallel.pytorch.sharded_state import like, part_of
from dltrain.parallel.pytorch.sharded_units import UnitCommunication, shard
from dltrain.protocol.errors import MisuseError
from dltrain.timing.stopwatch import Lap, reading


class FullyShardedParallel(Strategy):
    """Data parallelism in which every rank stores a part of the parameters, the gradients and the optimizer state."""

    sharded = writes_rows = True
    copies_state = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        process_group: ProcessGroup,
        device: torch.device,
        host: str,
        unit_nbytes: int,
        tail: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Move the model to ``device``, layer by layer, and shard it. All ranks must call this together.

        Layers of a deferred model get rank 0's initial values just before. The optimizer then has the sharded
        parameters, in the same groups. ``host``: the address of rank 0. ``unit_nbytes``: minimum size of parameters
        that are gathered together, before the rest of the model. ``tail``: number of values that ranks share at every
        step. ``dtype``: the 16-bit type in which ranks gather parameters; None for their own type. Raise PeerLostError
        if a rank is lost, BadInputError if torch or the GPUs do not support it, MisuseError for a model that cannot be
        sharded, and ValueError for an optimizer with state.
        """
        if optimizer.state:
            raise ValueError("optimizer: found state; expected none, because t.wrap loads it. Create a new optimizer")
        super().__init__(device)
        self._process_group = process_group
        self._shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
        self._collective = TorchDistributed(duplicate(process_group.comm), [torch.zeros(1, device=device)], host)
        before = dict(model.named_parameters(remove_duplicate=False))
        self._communication = UnitCommunication()
        world: Any = torch.distributed.group.WORLD
        mesh = DeviceMesh.from_group(world, device.type)
        with torch.no_grad(), without_weak_references(model):
            receive = receiver(process_group, model, device)
            units = shard(model, mesh, self._communication, unit_nbytes, dtype, receive)
        forget_initial_values(model)
        after = dict(model.named_parameters(remove_duplicate=False))
        stands_for = {id(old): after[name] for name, old in before.items()}
        for group in optimizer.param_groups:
            group["params"] = [stands_for[id(parameter)] for parameter in group["params"]]
        self.parameters: list[Any] = list(dict.fromkeys(after.values()))
        """The sharded parameters (DTensors)."""
        self._reached: set[int] = set()
        """Indices of the parameters that backward passes of this rank have reached in this step."""
        self._handles: list[Any] = [model.register_forward_hook(self._watch_backward)]
        self._watch_parameters(units)
        self._state: dict[str, Tensor] = model.state_dict()
        self._shared: list[Tensor | float] = [0.0] * tail
        self._summed: list[float] | None = None
        self._earlier: dict[int, Tensor] = {}
        """Sum of the weighted gradients of the step's earlier micro-batches, by the parameter's index."""
        self._open = self._finished = self._queued = self._partial = False
        self._has_gradients = self._clipped = False
        self._left = 1.0

    # Methods of a step

    @property
    def gradient_nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def tail_length(self) -> int:
        return len(self._shared)

    @property
    def waited(self) -> Lap:
        return self._communication.waited if self.parameters[0].device.type == "cpu" else Lap()

    def replicated(self, model: nn.Module) -> list[Tensor]:
        return []

    def begin(self, weight: float, shared: list[float], *, accumulates: bool = False) -> None:
        self._release()
        self._earlier.clear()
        self._reached.clear()
        self._shared, self._summed = list(shared), None
        self._communication.weight, self._communication.waited = 0.0 if accumulates else weight, Lap()
        self.exposed_s, self.square = 0.0, 0.0
        self.passes.begin()
        self._queued = self._partial = self._has_gradients = self._clipped = False
        self._open, self._finished, self._left = True, False, 1.0

    def begin_micro_batch(self, weight: float, *, last: bool) -> None:
        self._communication.weight = weight
        self._partial, self._has_gradients = not last, False

    def share(self, position: int, values: Sequence[Tensor | float]) -> bool:
        if not self._open or self._summed is not None:
            return False
        self._shared[position : position + len(values)] = values
        return True

    def weigh(self, weight: float) -> None:
        if not self._open or self._summed is not None or self._has_gradients:
            raise MisuseError("t.weigh: found a call after backward() has begun; expected it before backward()")
        self._communication.weight = weight

    def unscaled(self, scale: float, left: float) -> None:
        self._left = left
        self.square = self.square / scale**2 if self.square < inf else 0.0

    def any_rank(self, found: bool) -> bool:
        return self._process_group.sum([float(found)])[0] > 0

    def gradient_norm(self) -> float:
        """Return the norm of this rank's part of the reduced gradients. It is not finite if a gradient is not."""
        return sqrt(self.square) if self.square < inf else self.square

    def clip(self, max_norm: float) -> float:
        if not (self._open or self._finished) or self._partial:
            return 0.0
        self.whole()
        self.square, self._clipped = square_of(self._parts()), True
        norm = sqrt(self._process_group.sum([self.square])[0])
        if norm > max_norm:
            torch._foreach_mul_(self._parts(), max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        return norm / self._left

    def finish(self) -> list[float]:
        assert self._open, "begin comes before finish"
        self.whole()
        self._open = False
        if not self._clipped:
            self.square = square_of(self._parts())
        self.exposed_s = self.sum_s = self.waited.wall_s
        self._finished = True
        assert self._summed is not None, "whole() sets it"
        return self._summed

    def whole(self) -> None:
        """Wait until ``p.grad`` contains this rank's part of the gradient of the global batch.

        Raise PeerLostError if a rank is lost.
        """
        if self._summed is None:
            self._complete()

    def abandon(self) -> None:
        self._collective.abandon()

    def retire(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def close(self) -> None:
        """Leave torch's process group, if this object has created it. The model stays sharded."""
        self.retire()
        self._collective.close()

    def _parts(self) -> list[Tensor]:
        """Return this rank's parts of the gradients."""
        return [parameter.grad.to_local() for parameter in self.parameters if parameter.grad is not None]

    def _release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _watch_backward(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Call ``_begin_pass`` when the backward pass reaches ``outputs`` of the model: a forward hook."""
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._begin_pass())  # type: ignore[no-untyped-call]

    def _watch_parameters(self, units: Sequence[nn.Module]) -> None:
        """Record which parameters get gradients. A unit's whole parameters exist when its forward pass begins."""
        indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        rest = set(indices)
        for unit in units:
            places = [
                (module, name, indices[id(parameter)])
                for module in unit.modules()
                for name, parameter in module.named_parameters(recurse=False)
                if id(parameter) in rest
            ]
            rest -= {id(self.parameters[index]) for _, _, index in places}
            self._handles.append(unit.register_forward_pre_hook(self._watch_unit(places)))

    def _watch_unit(self, places: Sequence[tuple[nn.Module, str, int]]) -> Callable[[nn.Module, Any], None]:
        def begin(unit: nn.Module, inputs: Any) -> None:
            for module, name, index in places:
                parameter: Any = getattr(module, name)
                if parameter.requires_grad and not parameter._post_accumulate_grad_hooks:
                    parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._reached.add(index))

        return begin

    def _begin_pass(self) -> None:
        if self._queued or not self._open:
            return
        if self._summed is not None:
            raise gradient_checks.second_pass()
        self._queued = self._has_gradients = True
        self.passes.start()
        engine = Variable._execution_engine
        # The second callback runs after that of fully_shard, which waits for the reductions.
        engine.queue_callback(lambda: engine.queue_callback(self._pass_ended))

    def _pass_ended(self) -> None:
        self._queued = False
        self.passes.end()
        if not self._open:
            return
        if self._partial:
            self._set_aside()
        elif not self._no_sync:
            self._complete()

    def _set_aside(self) -> None:
        """Move the gradients of a micro-batch from ``p.grad``, where the script could change them."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                part = parameter.grad.to_local()
                self._earlier[index] = self._earlier[index] + part if index in self._earlier else part
                parameter.grad = None

    def _add_earlier(self) -> None:
        for index, part in self._earlier.items():
            parameter = self.parameters[index]
            if parameter.grad is None:
                parameter.grad = like(parameter, part)
            else:
                parameter.grad.to_local().add_(part)
        self._earlier.clear()

    def _complete(self) -> None:
        """Complete the gradients at the end of a step's last backward pass, and sum the shared values over ranks."""
        self._add_earlier()
        marks = [float(index in self._reached) for index in range(len(self.parameters))]
        began = reading()
        summed = self._process_group.sum([*marks, *(float(value) for value in self._shared)])
        self._communication.waited += reading() - began
        self._summed = summed[len(marks) :]
        for parameter, mark in zip(self.parameters, summed, strict=False):
            if not mark:  # no rank's backward pass has reached it: optimizers skip it, as in one process
                parameter.grad = None
        weights = 0.0 if self.weight_at is None else self._summed[self.weight_at]
        if weights and (parts := self._parts()):
            torch._foreach_div_(parts, weights)

    # Checkpoints

    def shape_of(self, model: nn.Module) -> Mapping[str, Tensor]:
        return self._shapes

    def weights(self, model: nn.Module, left_out: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the whole model's tensors on rank 0, in main memory, and an empty dictionary elsewhere.

        Ranks gather one tensor at a time. Raise PeerLostError if a rank is lost.
        """
        gathered = {name: self._whole(tensor) for name, tensor in super().weights(model, left_out).items()}
        return {name: whole for name, whole in gathered.items() if whole is not None}

    def load_weight(self, name: str, whole: Tensor) -> bool:
        target = self._state[name]
        with torch.no_grad():
            if isinstance(target, DTensor):
                target.to_local().copy_(self._part_of(whole))
            else:
                target.copy_(whole)
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the ``state_dict()`` of an optimizer for the whole model on rank 0, gathered from all ranks.

        On other ranks, the ``state_dict()`` has parameter groups, but an empty state. Raise PeerLostError if a rank is
        lost.
        """
        found = optimizer.state_dict()
        entries, others = sharded_state.by_owner(found["state"])
        states: dict[Any, Any] = others if self._process_group.rank == 0 else {}
        for index, entry in entries.items():
            whole = {key: self._whole(value) if isinstance(value, Tensor) else value for key, value in entry.items()}
            if self._process_group.rank == 0:
                states[index] = whole
        return {"state": states, "param_groups": found["param_groups"]}

    def optimizer_part(self, optimizer: Optimizer, index: int, key: str, whole: Tensor) -> Tensor | None:
        parameter = _divided_like(optimizer, index, whole.shape)
        if parameter is None:
            return whole.clone()
        part = torch.empty_like(parameter.to_local(), dtype=whole.dtype).copy_(self._part_of(whole))
        return like(parameter, part)

    def checkpoint_group(self) -> Any:
        return self._collective.another_group()

    def own_rows(self, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any], OwnRows]:
        rank, ranks = self._process_group.rank, self._process_group.size
        weights, of_weights = sharded_state.own_rows(model.state_dict(), rank, ranks)
        found = optimizer.state_dict()
        entries, states = sharded_state.by_owner(found["state"])
        flat = {(i, key): value for i, entry in entries.items() for key, value in entry.items()}
        tensors = {f"{i}.{key}": value for (i, key), value in flat.items() if isinstance(value, Tensor)}
        own, of_state = sharded_state.own_rows(tensors, rank, ranks)
        for (i, key), value in flat.items():
            if not isinstance(value, Tensor) or f"{i}.{key}" in own:
                states.setdefault(i, {})[key] = own.get(f"{i}.{key}", value)
        return weights, {"state": states, "param_groups": found["param_groups"]}, OwnRows(of_weights, of_state)

    def weight_part(self, name: str) -> tuple[Tensor, int]:
        target = self._state[name]
        if not isinstance(target, DTensor):
            return target, 0
        return target.to_local(), self._first_row(target.shape[0])

    def optimizer_space(
        self, optimizer: Optimizer, index: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, int]:
        parameter = _divided_like(optimizer, index, shape)
        if parameter is None:
            whole = torch.empty(shape, dtype=dtype, device="cpu")
            return whole, whole, 0
        part = torch.empty_like(parameter.to_local(), dtype=dtype, requires_grad=False)
        return like(parameter, part), part, self._first_row(shape[0])

    def _part_of(self, whole: Tensor) -> Tensor:
        return part_of(whole, self._process_group.rank, self._process_group.size)

    def _first_row(self, rows: int) -> int:
        return sharded_state.first_row(rows, self._process_group.rank, self._process_group.size)

    def _whole(self, tensor: Tensor) -> Tensor | None:
        """Return the whole tensor in main memory on rank 0, None elsewhere. ``tensor``: in parts, or whole."""
        try:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        except RuntimeError as error:
            raise_lost(error)
        return whole.to("cpu", copy=whole is tensor) if self._process_group.rank == 0 else None


def _divided_like(optimizer: Optimizer, index: int, shape: Sequence[int]) -> Any:
    """Return the parameter ``index``, as which a state of the shape ``shape`` is divided; None for others.

    Others are states such as Adam's ``step``, which every rank has as a whole.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = parameters[index] if index < len(parameters) else None
    return found if found is not None and tuple(found.shape) == tuple(shape) else None


def fully_sharded(
    plan: Plan, process_group: ProcessGroup, model: nn.Module, optimizer: Optimizer, device: torch.device, tail: int
) -> FullyShardedParallel:
    """Return the strategy Sharded of a plan on several ranks. All ranks must call this together.

    ``tail``: number of values that ranks share at every step.
    """
    unit_nbytes, dtype = min(UNIT_NBYTES, plan.bucket_nbytes), TYPES.get(plan.precision)
    return FullyShardedParallel(model, optimizer, process_group, device, plan.ranks[0].host, unit_nbytes, tail, dtype)
