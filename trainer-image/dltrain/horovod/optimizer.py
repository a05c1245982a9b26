"""An optimizer that reduces gradients over ranks before each step, as Horovod's ``DistributedOptimizer`` does.

Horovod reduces a gradient as soon as the backward pass has computed it. This layer reduces all gradients in ``step``,
after the backward pass. The result is the same, but communication does not overlap with computing.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dltrain.horovod.collectives import Compression, ReduceOp, check_options, chosen_op, reduce_on_host
from dltrain.horovod.world import world

BUCKET_NBYTES = 2**25
"""Size of the buffers in which gradients are reduced. The memory for gradients grows by one such buffer, or by the
largest gradient."""


class _Distributed(torch.optim.Optimizer):
    """The methods with which ``DistributedOptimizer`` extends the class of the optimizer that it gets."""

    _hvd_op: ReduceOp
    _hvd_sparse_as_dense: bool
    _hvd_synchronize_in_step: bool
    _hvd_synchronized: bool

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, but keep the parameter groups, which a scheduler of the given optimizer sets."""
        with same_groups(self):
            super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        """Reduce the gradients of all parameters over ranks now, for example to clip the result before the update.

        Then call ``step`` under ``skip_synchronize``. Otherwise ``step`` reduces the gradients again.
        """
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if world().comm is not None:
            _reduce_gradients(parameters, self._hvd_op, self._hvd_sparse_as_dense)
        self._hvd_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which ``step`` does not reduce gradients, because ``synchronize`` has reduced them."""
        self._hvd_synchronize_in_step = False
        try:
            yield
        finally:
            self._hvd_synchronize_in_step = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients over ranks and update the parameters. Under ``skip_synchronize``, only update them.

        ``closure``: computes loss and gradients, as in torch. Return what the optimizer's own ``step`` returns.
        """
        if not self._hvd_synchronize_in_step:
            self._hvd_synchronized = False
            return super().step(closure)
        if closure is None:
            if self._hvd_synchronized:
                warnings.warn(
                    "horovod.torch: optimizer.step() after optimizer.synchronize() reduces the gradients again. Call "
                    "it under optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
            self._hvd_synchronized = False
            return super().step(None)

        def with_reduced_gradients() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            return loss

        self._hvd_synchronized = False
        return super().step(with_reduced_gradients)

    # The step of the optimizer's own class runs the hooks. Otherwise, they would run twice after ``load_state_dict``.
    step.hooked = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def same_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context in which loading a state changes the content of groups and state, but replaces neither object.

    A ``DistributedOptimizer`` shares both with the optimizer from which it was made.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    loaded = [dict(group) for group in optimizer.param_groups], dict(optimizer.state)
    for group, content in zip(groups, loaded[0], strict=True):
        group.clear()
        group.update(content)
    state.clear()
    state.update(loaded[1])
    optimizer.param_groups, optimizer.state = groups, state


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class as ``optimizer`` that reduces gradients over ranks in ``step``.

    It shares parameter groups and state with ``optimizer``. ``op``: Average or Sum. ``named_parameters``: checked for
    duplicates. ``backward_passes_per_step``: gradients of several backward passes add up until ``step``, whatever this
    number is. ``gradient_predivide_factor``, ``num_groups``, ``groups``: accepted; they only affect speed and rounding.
    ``compression``: no effect, with a warning. Raise ValueError for arguments that this layer does not support.
    """
    check_options(compression, process_set)
    op = chosen_op(op)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"DistributedOptimizer: found op={op.value}; expected Average or Sum. Choose Average or Sum")
    if backward_passes_per_step < 1:
        raise ValueError(
            f"DistributedOptimizer: found backward_passes_per_step={backward_passes_per_step}; expected at least 1"
        )
    names = [name for name, _ in named_parameters or ()]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"DistributedOptimizer: found the names {twice} twice; expected each parameter once")
    kind = type(optimizer)
    made: _Distributed = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    # A scheduler of the given optimizer replaces its method step, which would bypass the reduction.
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._hvd_op, made._hvd_sparse_as_dense = op, sparse_as_dense
    made._hvd_synchronize_in_step, made._hvd_synchronized = True, False
    return made


def _reduce_gradients(parameters: list[torch.Tensor], op: ReduceOp, sparse_as_dense: bool) -> None:
    """Replace the gradients of ``parameters`` by their average or sum over ranks. A missing gradient counts as 0.

    All ranks must pass the same parameters. A parameter without gradient on all ranks gets a gradient of 0, as in
    Horovod.
    """
    for bucket in _buckets(parameters):
        flat = torch.empty(sum(p.numel() for p in bucket), dtype=_reduced_in(bucket[0].dtype), device="cpu")
        parts = torch.split(flat, [p.numel() for p in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            part.copy_(_dense(parameter, sparse_as_dense).reshape(-1)) if parameter.grad is not None else part.zero_()
        reduce_on_host(flat)
        if op is ReduceOp.AVERAGE:
            flat /= world().size
        for parameter, part in zip(bucket, parts, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with torch.no_grad():
                parameter.grad.copy_(part.view_as(parameter))


def _dense(parameter: torch.Tensor, sparse_as_dense: bool) -> torch.Tensor:
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        if not sparse_as_dense:
            raise ValueError(
                "DistributedOptimizer: found a sparse gradient; expected dense ones. Pass sparse_as_dense=True, or use "
                "an embedding with sparse=False"
            )
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad.detach()


def _buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split the parameters into lists whose gradients are reduced together, each of one data type.

    A list takes at most ``BUCKET_NBYTES`` bytes, unless it has a single larger parameter.
    """
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for parameter in parameters:
        kind = _reduced_in(parameter.dtype)
        own_nbytes = parameter.numel() * kind.itemsize
        if bucket and (kind != _reduced_in(bucket[0].dtype) or nbytes + own_nbytes > BUCKET_NBYTES):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(parameter)
        nbytes += own_nbytes
    if bucket:
        yield bucket


def _reduced_in(dtype: torch.dtype) -> torch.dtype:
    """Return the data type in which gradients of the type ``dtype`` are added.

    It is float64 for float64, and float32 for all other types. Complex gradients are not supported.
    """
    return torch.float64 if dtype is torch.float64 else torch.float32
