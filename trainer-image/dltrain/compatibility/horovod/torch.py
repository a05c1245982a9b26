"""The module ``horovod.torch`` of dljob's layer, for scripts with ``import horovod.torch as hvd``.

Python finds it only if Horovod itself is not installed.
"""

from typing import NoReturn

from dltrain.horovod.collectives import (
    Compression,
    ReduceOp,
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
)
from dltrain.horovod.optimizer import DistributedOptimizer
from dltrain.horovod.state import broadcast_optimizer_state, broadcast_parameters
from dltrain.horovod.world import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

Average, Sum, Min, Max, Product = (
    ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT,
)  # fmt: skip
Adasum = ReduceOp.ADASUM


def mpi_built() -> bool:
    return True


def mpi_enabled() -> bool:
    return True


def mpi_threads_supported() -> bool:
    return True


def gloo_built() -> bool:
    return False


def gloo_enabled() -> bool:
    return False


def nccl_built() -> bool:
    return False


def cuda_built() -> bool:
    return False


def rocm_built() -> bool:
    return False


__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min", "Product", "Sum", "allgather",
    "allgather_object", "allreduce", "allreduce_", "barrier", "broadcast", "broadcast_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "cross_rank", "cross_size", "cuda_built", "gloo_built",
    "gloo_enabled", "init", "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"horovod.torch: found {name}; expected one of dltrain.horovod: {', '.join(__all__)}. Do without it, or "
        "install Horovod in the image, which then takes precedence"
    )
