"""Collectives of a Horovod script on tensors and objects. All ranks must call them in the same order.

Horovod matches the calls of different ranks by their names, in any order. This layer ignores names.
"""

import enum
import warnings
from typing import Any

import torch

from dltrain.horovod import gradients
from dltrain.horovod.world import world

_NO_NUMPY = (torch.float16, torch.bfloat16)
"""Types of tensors that MPI cannot add or that numpy lacks. Their values are added in float32."""


class ReduceOp(enum.Enum):
    """Operation that combines the values of all ranks into one value."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"
    ADASUM = "Adasum"
    """A name only: functions reject it, because this layer has no Adasum. Scripts refer to it without using it."""


class Compression:
    """The values of the argument ``compression``. They have no effect: this layer sends gradients uncompressed."""

    none = "none"
    fp16 = "fp16"


def check_options(compression: Any = Compression.none, process_set: Any = None) -> None:
    """Warn if ``compression`` is given, which has no effect here. Raise ValueError if ``process_set`` is given."""
    if compression is not None and compression != Compression.none:
        warnings.warn(
            "horovod.torch: compression has no effect in dljob's layer: gradients are sent uncompressed", stacklevel=3
        )
    if process_set is not None:
        raise ValueError(
            "horovod.torch: found process_set; expected none, because this layer has no process sets. Remove "
            "process_set, or install Horovod in the image"
        )


def chosen_op(op: Any, average: bool | None = None) -> ReduceOp:
    """Return the operation that ``op`` or the older argument ``average`` chooses. Default: Average.

    Raise ValueError if both are set, and for Adasum.
    """
    if op is not None and average is not None:
        raise ValueError("horovod.torch: found both op and average; expected one of them. Remove average")
    if op is None:
        return ReduceOp.SUM if average is False else ReduceOp.AVERAGE
    if op is ReduceOp.ADASUM or not isinstance(op, ReduceOp):
        raise ValueError(
            f"horovod.torch: found op={op!r}; expected Average, Sum, Min, Max or Product. Choose one "
            "of these operations, or install Horovod in the image"
        )
    return op


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Return a new tensor with the average of ``tensor`` over ranks, or with the result of another operation ``op``.

    The arguments are those of Horovod. ``average``: the older form of ``op``. ``prescale_factor``,
    ``postscale_factor``: factors before and after the reduction. ``process_set``: must be None.

    With ``Average`` and ``Sum``, gradients flow through the result, see ``gradients``. The result of the other
    operations has no gradient.
    """
    check_options(compression, process_set)
    chosen = chosen_op(op, average)

    def reduced(values: torch.Tensor) -> torch.Tensor:
        result = values.detach().clone()
        _reduce(result, chosen, prescale_factor, postscale_factor)
        return result

    if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        return reduced(tensor)
    return gradients.carried(tensor, reduced, reduced)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Replace the values of ``tensor`` by their average over ranks, and return the same tensor.

    ``op``: another operation than the average. The other arguments are those of ``allreduce``.
    """
    check_options(process_set=process_set)
    _reduce(tensor.detach(), chosen_op(op, average), prescale_factor, postscale_factor)
    return tensor


def _reduce(tensor: torch.Tensor, op: ReduceOp, prescale: float, postscale: float) -> None:
    here = world()
    if here.comm is None and prescale * postscale == 1.0:
        return
    wide = tensor.to(torch.float32) if tensor.dtype in _NO_NUMPY else tensor
    wide = wide * prescale if prescale != 1.0 else wide
    on_host = wide.cpu().contiguous().clone()
    if here.comm is not None:
        reduce_on_host(on_host, op)
    if op is ReduceOp.AVERAGE:
        on_host = on_host / here.size if on_host.is_floating_point() else on_host // here.size
    if postscale != 1.0:
        on_host = on_host * postscale
    tensor.copy_(on_host)


def reduce_on_host(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
    """Replace the values of a contiguous ``tensor`` in main memory by their sum over ranks.

    ``op``: the minimum, maximum or product instead. With ``ReduceOp.AVERAGE``, the result is the sum: the caller must
    divide it by the number of ranks.
    """
    from mpi4py import MPI

    operations = {ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD}
    if tensor.numel():
        world().comm.Allreduce(MPI.IN_PLACE, tensor.view(-1).numpy(), operations.get(op, MPI.SUM))


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Return the tensors of all ranks in one tensor, joined along the first dimension in the order of the ranks.

    The other dimensions must be equal. A scalar counts as a tensor with one element. Gradients flow through the result:
    that of a rank's rows is the average of what all ranks have for these rows, as in Horovod.
    """
    check_options(process_set=process_set)
    here, first = world(), 0
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    if here.comm is None:
        return rows.clone()

    def joined(values: torch.Tensor) -> torch.Tensor:
        nonlocal first
        parts = here.comm.allgather(values.detach().cpu())
        first = sum(len(part) for part in parts[: here.rank])
        return torch.cat(parts).to(values.device)

    def own(gradient: torch.Tensor) -> torch.Tensor:
        return allreduce(gradient).narrow(0, first, len(rows))

    return gradients.carried(rows, joined, own)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Return a new tensor with the values that rank ``root_rank`` passes. All ranks must pass the same shape.

    Gradients flow through the result: the root's is the average over ranks, and that of other ranks is 0, as in
    Horovod.
    """
    check_options(process_set=process_set)

    def received(values: torch.Tensor) -> torch.Tensor:
        return broadcast_(values.detach().clone(), root_rank)

    def to_root(gradient: torch.Tensor) -> torch.Tensor:
        mean = allreduce(gradient)
        return mean if world().rank == root_rank else torch.zeros_like(mean)

    return gradients.carried(tensor, received, to_root)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Replace the values of ``tensor`` by those that rank ``root_rank`` passes, and return the same tensor."""
    check_options(process_set=process_set)
    here = world()
    if here.comm is not None and tensor.numel():
        on_host = tensor.detach().cpu().contiguous().clone()
        here.comm.Bcast(on_host.view(-1).view(torch.uint8).numpy(), root_rank)
        with torch.no_grad():
            tensor.copy_(on_host)
    return tensor


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Return the object that rank ``root_rank`` passes, on every rank. It must be picklable."""
    check_options(process_set=process_set)
    here = world()
    return obj if here.comm is None else here.comm.bcast(obj, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Return the objects that all ranks pass, in the order of the ranks. They must be picklable."""
    check_options(process_set=process_set)
    here = world()
    return [obj] if here.comm is None else list(here.comm.allgather(obj))


def barrier(process_set: Any = None) -> None:
    """Wait until all ranks have called this function."""
    check_options(process_set=process_set)
    here = world()
    if here.comm is not None:
        here.comm.Barrier()
