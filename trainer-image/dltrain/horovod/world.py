"""The ranks of a Horovod script: all ranks that mpirun started, or this process alone without mpirun."""

import atexit
import os
from dataclasses import dataclass
from typing import Any

from dltrain.comm.process_group import find_mpi
from dltrain.protocol.mpi_settings import MPI_SETTINGS


@dataclass(frozen=True)
class World:
    """All ranks of the script. ``comm``: their mpi4py communicator, or None for one process without mpirun."""

    comm: Any = None
    rank: int = 0
    size: int = 1


_worlds: list[World] = []
"""A list with the ``World`` between ``init`` and ``shutdown``; otherwise an empty list."""


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the ranks that mpirun started. Do nothing if this process has already joined them.

    ``comm``: an mpi4py communicator of all ranks of the script. Default: all ranks. Raise ValueError for a list of
    ranks, for process sets, and if another launcher than mpirun started several ranks.
    """
    if _worlds:
        return
    if process_sets or isinstance(comm, list | tuple):
        raise ValueError(
            f"horovod.torch.init: found {'process_sets' if process_sets else f'comm={comm!r}'}; expected none, because "
            "this layer has no groups of some of the ranks. Remove it, or install Horovod in the image"
        )
    if comm is None and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ValueError(
                f"horovod.torch.init: found {ranks} ranks that mpirun did not start; expected mpirun, because "
                "otherwise each rank would train alone. Set trainer.framework: MPI, or start the script with mpirun"
            )
        _worlds.append(World())
        return
    for name, value in MPI_SETTINGS.items():
        os.environ.setdefault(name, value)
    find_mpi()
    from mpi4py import MPI  # a local import, because importing it may start MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize)
    own = (MPI.COMM_WORLD if comm is None else comm).Dup()  # Messages of the script's own MPI calls stay apart.
    _worlds.append(World(own, own.Get_rank(), own.Get_size()))


def _finalize() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def shutdown() -> None:
    """Forget the ranks that ``init`` has joined, so that ``init`` may be called again. MPI keeps running."""
    _worlds.clear()


def is_initialized() -> bool:
    """Return True after ``init`` and before ``shutdown``."""
    return bool(_worlds)


def world() -> World:
    """Return the ``World`` (all ranks of the script) that ``init`` has joined. Raise ValueError before ``init``."""
    if not _worlds:
        raise ValueError(
            "horovod.torch: found a call before init; expected hvd.init() first. Call it once at the start"
        )
    return _worlds[0]


def rank() -> int:
    return world().rank


def size() -> int:
    return world().size


def local_rank() -> int:
    """Return this rank's number among the ranks of its pod, which is also the number of its GPU."""
    return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")) if world().size > 1 else 0


def local_size() -> int:
    """Return the number of ranks in this pod."""
    return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) if world().size > 1 else 1


def cross_rank() -> int:
    """Return the number of this rank's pod among the pods of the job; 0 for a single rank."""
    return int(os.environ.get("GROUP_RANK", "0")) if world().size > 1 else 0


def cross_size() -> int:
    """Return the number of pods of the job; 1 for a single rank."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) if world().size > 1 else 1


def is_homogeneous() -> bool:
    """Return True if all pods have the same number of ranks. All ranks must call it."""
    here = world()
    return here.comm is None or len(set(here.comm.allgather(local_size()))) == 1
