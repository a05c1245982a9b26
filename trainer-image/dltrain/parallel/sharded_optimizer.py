"""Sharded optimizer (ZeRO-1): each rank owns a part of the parameters. It updates this part and stores its state.

A reduce-scatter sums each part of the gradients on the rank that owns the part. The ranks update their parts, and an
all-gather distributes the new parameters. The traffic is the same as that of one all-reduce, and with n ranks the
optimizer state takes 1/n of the memory (Rajbhandari et al. 2020, stage 1). For element-wise optimizers the result is
that of replicated optimizers.

Parameters become views of one buffer with the same layout as the gradients. In the script's optimizer, this rank's
shards of that buffer replace the parameters, so that learning rates, groups and hyperparameters apply unchanged.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from dlcontract import Plan
from dltrain.comm.algorithms.reduce_scatter import Scattered, make_all_gather, owned
from dltrain.comm.core.collective import Collective
from dltrain.comm.process_group import ProcessGroup
from dltrain.optim.options import load_own_state
from dltrain.parallel.data_parallel import DataParallel
from dltrain.parallel.gradient_buffer import square_of
from dltrain.parallel.optimizer_checks import check_late, check_no_common_state
from dltrain.protocol.errors import BadInputError, MisuseError

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop)
_STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg")
"""Names of the state that ``ELEMENTWISE`` optimizers have for each element. Their only other state is ``step``."""


@dataclass(frozen=True)
class Shard:
    """The part of one parameter that this rank owns, that is, updates. ``gradient``: the part's reduced gradient."""

    parameter: nn.Parameter
    """The part's values: a one-dimensional view of the buffer with all parameters."""
    start: int
    stop: int
    """The part consists of the elements from ``start`` to ``stop`` (exclusive) of the whole parameter."""
    gradient: Tensor


class OptimizerParallel(DataParallel):
    """Data parallelism with a sharded optimizer. This rank's shards replace the optimizer's parameters."""

    sharded = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Optimizer,
        process_group: ProcessGroup,
        collective: Callable[[list[Tensor]], Collective],
        gather: Callable[[list[Tensor]], Collective],
        bucket_nbytes: int,
        tail: int,
    ) -> None:
        """Shard the parameters.

        ``collective``: returns the reduce-scatter for buffers. ``gather``: returns the all-gather for buffers.
        ``bucket_nbytes``: maximum size of a bucket. ``tail``: number of values that ranks share at every step.

        Raise BadInputError for an optimizer that is not element-wise, and ValueError for an optimizer with state.
        """
        _check(optimizer)
        super().__init__(parameters, collective, bucket_nbytes, tail)
        self._process_group = process_group
        values = torch.empty_like(self.buffer.gradient)
        self._shards: dict[nn.Parameter, Shard] = {}
        offset = 0
        with torch.no_grad():
            for bucket in self.buffer.buckets:
                begin, end = (
                    bucket.start + e for e in owned(process_group.rank, process_group.size, bucket.stop - bucket.start)
                )
                for parameter in (self.buffer.parameters[i] for i in bucket.parameters):
                    stop = offset + parameter.numel()
                    values[offset:stop] = parameter.reshape(-1)
                    parameter.data = values[offset:stop].view(parameter.shape)
                    a, b = max(begin, offset), min(end, stop)
                    if a < b:
                        part, gradient = nn.Parameter(values[a:b]), self.buffer.gradient[a:b]
                        self._shards[parameter] = Shard(part, a - offset, b - offset, gradient)
                    offset = stop
        self._spread = gather([values[b.start : b.stop] for b in self.buffer.buckets])
        self._collect = gather([self.buffer.gradient[b.start : b.stop] for b in self.buffer.buckets])
        self._optimizer = optimizer
        self._groups: list[list[nn.Parameter]] = []
        self._divide_groups()

    def stands_in(self, parameter: nn.Parameter) -> bool:
        return any(parameter is shard.parameter for shard in self._shards.values())

    def _divide_groups(self) -> None:
        """Replace the optimizer's parameters by this rank's shards.

        Only parameter groups that the optimizer got since the last call are changed. Raise MisuseError if such a group
        has a parameter that does not belong to the model.
        """
        for group in self._optimizer.param_groups[len(self._groups) :]:
            members = list(group["params"])
            known = {*self.buffer.parameters, *self._frozen}
            check_late([parameter for parameter in members if parameter not in known])
            self._groups.append(members)
            group["params"] = [self._shards[p].parameter for p in members if p in self._shards]

    def begin_micro_batch(self, weight: float, *, last: bool) -> None:
        super().begin_micro_batch(weight, last=last)
        for shard in self._shards.values():
            shard.parameter.grad = None  # a view of the buffer, which the script's ``zero_grad`` would zero

    def finish(self) -> list[float]:
        """Wait for the reduction of the step's gradients. Only this rank's shards get reduced gradients.

        Return the tail (the values after the gradients in the buffer), summed over ranks.

        The shard of a frozen parameter gets no gradient. The shard of a parameter that the backward pass did not reach
        gets the gradient 0, so that all shards of the parameter count the same number of steps.
        """
        self._divide_groups()
        shared = super().finish()
        for whole, shard in self._shards.items():
            shard.parameter.grad = shard.gradient if whole.requires_grad else None
        self.square = self._square_of_parts()
        return shared

    def _square_of_parts(self) -> float:
        return square_of(shard.gradient for shard in self._shards.values())

    def _norm_of_all(self) -> float:
        return sqrt(self._process_group.sum([self._square_of_parts()])[0])

    def unscaled(self, scale: float, left: float) -> None:
        super().unscaled(scale, left)
        self.square = self.square / scale**2 if self.square < inf else 0.0

    def any_rank(self, found: bool) -> bool:
        return self._process_group.sum([float(found)])[0] > 0

    def spread(self) -> None:
        """Send this rank's updated parameters to all ranks and receive theirs, after the optimizer's step.

        Raise PeerLostError if a rank is lost.
        """
        began = time.perf_counter()
        _run(self._spread)
        self.exposed_s += time.perf_counter() - began

    def gradient_norm(self) -> float:
        """Return the norm of the reduced gradient on this rank's shards only, not of the whole gradient.

        The norm is not finite if a gradient is not finite.
        """
        return sqrt(self.square) if self.square < inf else self.square

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the ``state_dict()`` of an equivalent replicated optimizer. Any number of ranks can resume from it.

        For one kind of state (such as Adam's ``exp_avg``) after another, ranks exchange the state of their shards. They
        use the gradient buffer for this purpose, which is free between steps. Raise PeerLostError if a rank is
        lost.
        """
        own = {p: optimizer.state.get(s.parameter, {}) for p, s in self._shards.items()}
        present = [key for state in own.values() for key, value in state.items() if value is not None]
        # Number of steps of each parameter, or -1 if this rank does not know it. A parameter that was frozen for some
        # time has fewer steps.
        counted = [float(own.get(p, {}).get("step", -1)) for p in self.buffer.parameters]
        rows = self._process_group.gather([float(key in present) for key in _STATE] + counted)
        agreed = [max(column) for column in zip(*rows, strict=True)]
        indices = {p: i for i, p in enumerate(p for members in self._groups for p in members)}
        trained = [p for p in self.buffer.parameters if p in indices]
        states: dict[int, dict[str, Any]] = {indices[p]: {} for p in trained}
        for key in (key for key, there in zip(_STATE, agreed, strict=False) if there):
            self.buffer.flat.zero_()
            for parameter, shard in self._shards.items():
                if (value := own[parameter].get(key)) is not None:
                    shard.gradient.copy_(value)
            _run(self._collect)
            for parameter, view in zip(self.buffer.parameters, self.buffer.views, strict=True):
                if parameter in indices:
                    states[indices[parameter]][key] = view.to("cpu", copy=True)
        steps = dict(zip(self.buffer.parameters, agreed[len(_STATE) :], strict=True))
        if max(steps.values(), default=-1) >= 0:
            states = {
                indices[p]: states[indices[p]] | {"step": torch.tensor(steps[p], device="cpu")}
                for p in trained
                if steps[p] >= 0
            }
        groups = optimizer.state_dict()["param_groups"]
        for group, members in zip(groups, self._groups, strict=True):
            group["params"] = [indices[p] for p in members]
        return {"state": states, "param_groups": groups}

    def check_divided_state(self, optimizer: Optimizer) -> None:
        check_no_common_state(optimizer)
        kind = type(optimizer).__name__
        for shard in self._shards.values():
            for key, value in optimizer.state.get(shard.parameter, {}).items():
                if value is None or (key == "step" and _is_number(value)):
                    continue
                if key not in _STATE:
                    raise MisuseError(
                        f"{kind}: found {key!r} in its state of a parameter; expected only step, {', '.join(_STATE)}, "
                        "which strategy Optimizer can save. Use parallelism.strategy Data, or another optimizer"
                    )
                if not isinstance(value, Tensor) or value.shape != shard.parameter.shape:
                    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
                    raise MisuseError(
                        f"{kind}: found {found} as {key!r} in its state of a parameter; expected a tensor with a "
                        "number for each element, which strategy Optimizer can save. Use parallelism.strategy Data, "
                        "or another optimizer"
                    )

    def optimizer_part(self, optimizer: Optimizer, index: int, key: str, whole: Tensor) -> Tensor | None:
        members = [p for ps in self._groups for p in ps]
        shard = self._shards.get(members[index]) if index < len(members) else None
        if shard is None:
            return None
        if key not in _STATE:
            return whole.clone()
        return whole.reshape(-1)[shard.start : shard.stop].to(shard.parameter.device, copy=True)

    def load_optimizer(self, optimizer: Optimizer, parts: dict[str, Any]) -> None:
        """Load the optimizer's state for this rank's shards (parts of parameters) from a checkpoint.

        ``parts``: a ``state_dict()`` with the groups and parameter indices of a replicated optimizer. Its tensors are
        already this rank's parts (see ``optimizer_part``).
        """
        load_own_state(optimizer, parts, self._groups, self._shards)

    def abandon(self) -> None:
        for collective in (self.collective, self._spread, self._collect):
            collective.abandon()

    def close(self) -> None:
        self._spread.close()
        self._collect.close()
        super().close()


def optimizer_parallel(
    plan: Plan, process_group: ProcessGroup, model: nn.Module, optimizer: Optimizer, tail: int
) -> OptimizerParallel:
    """Return the strategy of a plan with a sharded optimizer on several ranks.

    ``tail``: number of values that ranks share at every step.
    """
    host = plan.ranks[0].host

    def collective(buffers: list[Tensor]) -> Collective:
        name = "Torch" if buffers[0].is_cuda else plan.collective
        return Scattered(process_group.comm.Dup(), buffers, tail, name, plan.segment_nbytes, host)

    def gather(buffers: list[Tensor]) -> Collective:
        name = "Torch" if buffers[0].is_cuda else plan.collective
        return make_all_gather(process_group.comm.Dup(), buffers, name, plan.segment_nbytes, host)

    return OptimizerParallel(model.parameters(), optimizer, process_group, collective, gather, plan.bucket_nbytes, tail)


def _check(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, ELEMENTWISE):
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise BadInputError(
            "spec.parallelism.strategy",
            f"strategy Optimizer with the optimizer {type(optimizer).__name__}",
            f"an element-wise optimizer ({names})",
            "choose one of these optimizers, or strategy Data",
        )
    if optimizer.state:
        raise ValueError("optimizer: found state; expected none, because t.wrap loads it. Create a new optimizer")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _run(collective: Collective) -> None:
    works = [collective.start(index) for index in range(len(collective.buffers))]
    for work in works:
        work.wait()
