"""Recognize collectives of torch.distributed among the operators of a step, with their bytes.

Also those that C++ starts, such as the all-reduces of DistributedDataParallel and the all-gathers of FSDP, are
operators of torch's dispatcher. So are the bitmap of ``find_unused_parameters`` and the broadcast of buffers.
"""

from __future__ import annotations

from typing import Any

from .counting import tensors_in

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_KINDS = (
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("broadcast", "broadcast"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("barrier", "barrier"),
    ("reduce_", "reduce"),
    ("gather", "gather"),
    ("scatter", "gather"),
    ("send", "message"),
    ("recv", "message"),
)
"""Part of an operator's name → kind of collective (``dlcontract.CollectiveCount``). The first part that fits counts."""


def collective_kind(func: Any) -> str | None:
    """Return the kind of collective that the operator ``func`` starts; None if it starts none, such as a wait."""
    if func.namespace not in _NAMESPACES:
        return None
    name = func._overloadpacket.__name__
    return next((kind for part, kind in _KINDS if part in name), None)


def collective_nbytes(kind: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes of a collective's buffer with the parts of all ranks.

    This is the largest of what it is given and what it returns: an all-gather is given a part, and returns the whole.
    """
    if kind == "barrier":
        return 0
    return max(
        (sum(t.numel() * t.element_size() for t in tensors_in([each])) for each in [*args, *kwargs.values(), result]),
        default=0,
    )


def is_distributed_tensor(types: Any) -> bool:
    """Return True if an operator has arguments of torch's class DTensor, whose parts the ranks have."""
    return any(each.__name__ == "DTensor" for each in types)
