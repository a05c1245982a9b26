"""MPI's errors after the loss of peers, and its fault tolerance (ULFM): revoke, agree, shrink."""

from typing import Any

import numpy as np

from dltrain.comm.core.waiting import wait_until
from dltrain.protocol.errors import PeerLostError

_OWN_MISTAKES = ("TRUNCATE", "ARG", "BUFFER", "COUNT", "TYPE", "TAG", "RANK", "COMM", "REQUEST", "OP")


def revoke(comm: Any) -> None:
    """Make all operations in the communicator ``comm`` fail from now on, so that no rank waits in it for a lost rank.

    Without MPI's fault tolerance, do nothing, because mpirun then ends the other ranks.
    """
    from mpi4py import MPI

    try:
        comm.Revoke()
    except (MPI.Exception, NotImplementedError):
        return  # without fault tolerance, mpirun ends the other ranks


def translate(error: Any) -> Exception:
    """Return the exception that a caller must raise for the ``MPI.Exception`` ``error``.

    This is RuntimeError if this program called MPI wrongly, which a restart cannot fix, and PeerLostError otherwise.
    """
    from mpi4py import MPI

    if error.Get_error_class() in {getattr(MPI, f"ERR_{name}") for name in _OWN_MISTAKES}:
        return RuntimeError(f"MPI rejected a call: {error}")
    return PeerLostError(f"lost a peer: {error}")


def duplicate(comm: Any) -> Any:
    """Return a duplicate of the communicator ``comm``. Raise PeerLostError if a rank is lost."""
    from mpi4py import MPI

    try:
        return comm.Dup()
    except MPI.Exception as error:
        raise translate(error) from error


def agree(comm: Any, mine: bool) -> bool:
    """Return True if ``mine`` is true on every rank of ``comm`` and no rank was lost.

    All live ranks get the same answer. ULFM's uniform agreement also works in a revoked communicator.
    """
    from mpi4py import MPI

    flag = np.array([mine], dtype=np.int32)
    try:
        request = comm.Iagree(flag)
        wait_until(request.Test)
    except MPI.Exception:
        return False
    return bool(flag[0])


def shrink(comm: Any) -> Any:
    """Return a new communicator of the live ranks of ``comm``, in the same order.

    Raise PeerLostError if MPI cannot create it.
    """
    from mpi4py import MPI

    try:
        return comm.Shrink()  # Ishrink of Open MPI 5.0.11 fails with MPI_ERR_INTERN
    except MPI.Exception as error:
        raise translate(error) from error
