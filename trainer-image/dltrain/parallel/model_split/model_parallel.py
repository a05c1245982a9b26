"""Common base of pipeline and tensor parallelism: each rank holds a part of the model and processes all samples.

Ranks sum only the shared numbers (the tail, see ``buffer_tail``) and gradients of parameters that several ranks have.
With several replicas of the model, each processes a part of the batch, and ranks with the same part of the model sum
their gradients as with data parallelism (``replicas``).
The script's model object is modified: its parameters become this rank's parts, which may be empty. The script's
optimizer then contains only this rank's parameters.

Rank 0 gathers the whole model and optimizer state in main memory for checkpoints, so that another number of ranks or
another strategy can resume from them.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dltrain.batch.sampling import Part, Sampler
from dltrain.models.deferred import forget_initial_values, initial_values
from dltrain.optim.options import load_own_state
from dltrain.parallel import gradient_checks
from dltrain.parallel.data_parallel import DataParallel
from dltrain.parallel.gradient_buffer import square_of
from dltrain.parallel.model_split.deferred_values import (
    give_values,
    receive_buffers,
    received,
    without_weak_references,
)
from dltrain.parallel.model_split.optimizer_state import check_split_state, collect, gathered_plain, plain
from dltrain.parallel.model_split.replicas import Replicas
from dltrain.parallel.placement import Copies
from dltrain.timing.stopwatch import Lap


@dataclass(frozen=True)
class Cut:
    """A part of a tensor: the entries with the indices ``index`` along the dimension ``dim``."""

    dim: int
    index: Tensor

    def of(self, whole: Tensor) -> Tensor:
        return whole.index_select(self.dim, self.index.to(whole.device))


Held = Mapping[str, Cut | None]
"""Name of a parameter → the part of this parameter that a rank has. None: the rank has the whole parameter.

Parameters of which the rank has nothing are absent."""


class ModelParallel(DataParallel):
    """Base class for a model that is split over the ranks.

    It exchanges the values that ranks share at every step, gathers checkpoints and splits the optimizer.
    """

    copies_state = True  # the gathered tensors are copies in rank 0's main memory

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        replicas: Replicas,
        held_by: Callable[[int], Held],
        tail: int,
        bucket_nbytes: int,
        device: torch.device,
    ) -> None:
        """Split ``model`` and ``optimizer``, so that this rank has only its part.

        If the model is deferred, its parameters get rank 0's initial values here, one after the other, so that no rank
        ever has more than its part and the largest parameter. All ranks must call this method together.

        ``held_by``: returns the parameters, or parts of them, that part i of the model has. ``tail``: number of values
        that ranks share at every step. ``bucket_nbytes``: maximum size of the parts in which gradients are summed over
        replicas. ``device``: this rank's torch device. Raise PeerLostError if a rank is lost, and ValueError for a
        model with buffers in its ``state_dict()``, or an optimizer with state.
        """
        named = dict(model.named_parameters())
        state = model.state_dict()
        names = {parameter: name for name, parameter in named.items()}
        self._aliases = {
            alias: names[parameter]
            for alias, parameter in model.named_parameters(remove_duplicate=False)
            if alias not in named
        }
        """Other names of a parameter, such as those of tied weights → the name in ``named_parameters()``."""
        if extra := sorted(set(state) - set(named) - set(self._aliases)) or optimizer.state:
            raise ValueError(
                f"model, optimizer: found buffers {extra} in the model, or an optimizer with state; expected neither, "
                "because this parallelism strategy splits only parameters. Use another strategy"
            )
        self.replicas, self._held_by = replicas, held_by
        self._completed = False
        """True if the gradients of this step are summed over all ranks that have them."""
        self._sealed: int | None = None
        """Version counter of the gradients' memory after the script's backward pass; None before that."""
        self.shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
        """Shapes of the whole model's tensors."""
        self._held = held_by(replicas.part)
        before = [held_by(part) for part in range(replicas.part)]
        self._reported = {
            name
            for name, cut in (self._held.items() if replicas.index == 0 else ())
            if cut is not None or not any(name in held for held in before)
        }
        """Names of the parameters that this rank contributes to checkpoints and norms.

        If several ranks have the same part or the same whole parameter, the lowest of these ranks contributes it.
        """
        self._trained = {name for name, parameter in named.items() if parameter.requires_grad}
        initial = initial_values(model)
        with torch.no_grad(), without_weak_references(model):
            for name, parameter in named.items():
                held, part = name in self._held, self._held.get(name)
                whole = parameter.data
                if initial is not None:
                    stays = held and part is None and device.type == "cpu"
                    whole = received(replicas.whole, initial, name, parameter, stays=stays)
                if held:
                    give_values(parameter, (whole if part is None else part.of(whole)).to(device))
                else:
                    give_values(parameter, torch.empty(0, dtype=parameter.dtype, device=device))
                    parameter.requires_grad_(False)
            if initial is not None:
                receive_buffers(replicas.whole, initial, model, device)
        forget_initial_values(model)
        self._own = {name: named[name] for name in self._held}
        self._groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        self._members = [name for group in self._groups for name in group]
        for group, members in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [self._own[name] for name in members if name in self._own]
        super().__init__(self._own.values(), replicas.summing, bucket_nbytes, tail)
        if replicas.count == 1:
            self.retire()  # hooks are not needed: each micro-batch has a backward pass, without a reduction after it

    # Methods of a step

    def part(self, sampler: Sampler, step: int, shares: Sequence[int], rank: int) -> Part:
        return self.replicas.batch(sampler, step)

    def replicated(self, model: nn.Module) -> list[Tensor]:
        return []

    def copies(self) -> Copies | None:
        if self.replicas.count == 1:
            return None
        return Copies(self.replicas.peers, self.replicas.numbers_of_peers, list(self._own.values()))

    def begin(self, weight: float, shared: list[float], *, accumulates: bool = False) -> None:
        super().begin(weight, shared, accumulates=accumulates)
        self._completed, self._sealed = False, None

    def seal(self) -> None:
        """Remember the gradients, after the script's backward pass, so that later changes by the script are found."""
        if not self._completed:
            self._sealed = self.buffer.flat._version

    def share(self, position: int, values: Sequence[Tensor | float]) -> bool:
        intact = self._sealed == self.buffer.flat._version
        shared = super().share(position, values)
        if intact:
            self._sealed = self.buffer.flat._version
        return shared

    def whole(self) -> None:
        """Complete the gradients of this rank's parameters, and compute its part of the squared norm.

        Raise PeerLostError if a rank is lost, and MisuseError if the script has changed gradients before.
        """
        if self._completed:
            return
        if self._sealed not in (None, self.buffer.flat._version):
            raise gradient_checks.changed("each rank holds only a part of the gradients (model parallelism)")
        if self.replicas.count == 1:
            for index in range(len(self.buffer.parameters)):
                self.buffer.adopt(index)
        else:
            super().whole()  # summed over the ranks with the same part of the model
        self._completed, began = True, time.perf_counter()
        self.complete_gradients()
        self.exposed_s += time.perf_counter() - began
        gradients = [own.grad for name, own in self._own.items() if name in self._reported and own.grad is not None]
        self.square = square_of(gradients)

    def finish(self) -> list[float]:
        """Complete the gradients of this rank's parameters after the step's backward passes.

        Return the tail, the values that ranks share at every step, summed over ranks. Raise PeerLostError if a rank is
        lost.
        """
        assert self._open, "begin comes before finish"
        if self.replicas.count == 1:
            self._open = False
            self.whole()
            self._finished, shared = True, self.buffer.tail.tolist()
        else:
            shared = super().finish()
        began = time.perf_counter()
        shared = self.replicas.own.sum(shared)
        self.exposed_s += time.perf_counter() - began
        return shared

    def _norm_of_all(self) -> float:
        """Return the norm of the whole model's gradient, for clipping. All ranks of a replica must call this method.

        Only replica 0 has squared norms of its own (see ``_reported``), so all ranks of the job take part.
        """
        (square,) = self.replicas.whole.sum([float(self.square)])
        return float(square**0.5)

    def complete_gradients(self) -> None:
        """Add the contributions of other ranks to gradients of parameters that several ranks have.

        Do nothing by default. A pipeline overrides this for tied weights, which several stages use. Raise PeerLostError
        if a rank is lost.
        """

    def abandon(self) -> None:
        super().abandon()
        self.replicas.abandon()

    def _wait(self, seconds: float) -> None:
        """Add ``seconds`` to the time that this step spent waiting for other ranks."""
        self._waited += Lap(seconds)
        self.exposed_s += seconds

    def gradient_norm(self) -> float:
        """Return the norm of the gradients of this rank's parameters.

        If several ranks have the same whole parameter, only the lowest of these ranks includes the parameter.
        """
        return float(self.square**0.5)

    # Checkpoints

    def shape_of(self, model: nn.Module) -> dict[str, Tensor]:
        return self.shapes

    def weights(self, model: nn.Module, left_out: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the whole model's tensors on rank 0, and an empty dictionary elsewhere.

        ``left_out``: names of tensors that ranks do not gather. Raise PeerLostError if a rank is lost.
        """
        mine = {name: self._own[name].data for name in self._reported if name not in left_out}
        whole = self._gathered(mine, lambda name: name)
        known = {name: self._aliases.get(name, name) for name in self.shapes}
        return {name: whole[other] for name, other in known.items() if other in whole}

    def load_weight(self, name: str, whole: Tensor) -> bool:
        if name in self._own:
            part = self._held[name]
            self._own[name].data.copy_(whole if part is None else part.of(whole))
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the ``state_dict()`` of an optimizer for the whole model on rank 0, gathered from all ranks.

        On other ranks, the ``state_dict()`` has parameter groups, but an empty state. Raise PeerLostError if a rank
        is lost.
        """
        mine = {
            f"{self._members.index(name)}.{key}": value
            for name in self._reported
            for key, value in optimizer.state.get(self._own[name], {}).items()
            if isinstance(value, Tensor)
        }
        states: dict[int, dict[str, Any]] = {}
        for entry, tensor in self._gathered(mine, lambda entry: self._members[int(entry.split(".")[0])]).items():
            index, _, key = entry.partition(".")
            states.setdefault(int(index), {})[key] = tensor
        kind = type(optimizer).__name__
        others = {
            name: plain(optimizer.state.get(self._own[name], {}), f"{kind}: state of parameter {name}")
            for name in self._reported
        }
        for name, rest in gathered_plain(self.replicas.whole, others).items():
            if rest:
                states.setdefault(self._members.index(name), {}).update(rest)
        groups = optimizer.state_dict()["param_groups"]
        at = iter(range(len(self._members)))
        for group, members in zip(groups, self._groups, strict=True):
            group["params"] = [next(at) for _ in members]
        return {"state": states, "param_groups": groups}

    def check_divided_state(self, optimizer: Optimizer) -> None:
        check_split_state(optimizer, self._own, [name for name, part in self._held.items() if part is not None])

    def optimizer_part(self, optimizer: Optimizer, index: int, key: str, whole: Tensor) -> Tensor | None:
        name = self._members[index] if index < len(self._members) else ""
        if name not in self._own:
            return None
        part = self._held[name]
        if part is None or whole.shape != self.shapes[name].shape:  # or a scalar such as Adam's ``step``
            return whole.to(self._own[name].device, copy=True) if whole.dim() else whole.clone()
        return part.of(whole).to(self._own[name].device)

    def load_optimizer(self, optimizer: Optimizer, parts: dict[str, Any]) -> None:
        """Load the optimizer's state for this rank's parameters from a checkpoint.

        ``parts``: a ``state_dict()`` with the groups and parameter indices of an optimizer for the whole model. Its
        tensors are already this rank's parts (see ``optimizer_part``).
        """
        load_own_state(optimizer, parts, self._groups, self._own)

    def _gathered(self, mine: dict[str, Tensor], name_of: Callable[[str], str]) -> dict[str, Tensor]:
        """Return whole tensors on rank 0, assembled from the parts of all ranks; an empty dictionary elsewhere.

        ``mine``: this rank's parts of parameters or of their optimizer state, by key. ``name_of``: returns the name of
        the parameter to which a key belongs.
        """
        from safetensors.torch import load, save

        whole: dict[str, Tensor] = {}
        content = save({entry: tensor.detach().cpu().contiguous() for entry, tensor in mine.items()})
        for rank, part in enumerate(collect(self.replicas.whole, content)):
            held = self._held_by(rank % self.replicas.parts)
            for entry, tensor in load(part).items():
                shape, part_of = self.shapes[name_of(entry)].shape, held[name_of(entry)]
                if part_of is None or tensor.dim() != len(shape):  # or a scalar such as Adam's ``step``
                    whole[entry] = tensor
                else:
                    there = whole.setdefault(entry, torch.empty(shape, dtype=tensor.dtype, device="cpu"))
                    there.index_copy_(part_of.dim, part_of.index, tensor)
        return whole
