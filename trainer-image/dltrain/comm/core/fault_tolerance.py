"""What MPI says of lost peers, and its fault tolerance (ULFM): revoke, agree, shrink."""

from typing import Any

import numpy as np

from dltrain.comm.core.waiting import wait_until
from dltrain.protocol.errors import PeerLostError

_OWN_MISTAKES = ("TRUNCATE", "ARG", "BUFFER", "COUNT", "TYPE", "TAG", "RANK", "COMM", "REQUEST", "OP")


def revoke(comm: Any) -> None:
    """Wake every rank that waits in ``comm``, wherever in the ring it is: its operations fail from now on."""
    from mpi4py import MPI

    try:
        comm.Revoke()
    except (MPI.Exception, NotImplementedError):
        return  # an MPI without fault tolerance: its mpirun ends the others


def translate(error: Any) -> Exception:
    """What to raise for an ``MPI.Exception``: a relaunch cures a lost peer, but no wrong call."""
    from mpi4py import MPI

    if error.Get_error_class() in {getattr(MPI, f"ERR_{name}") for name in _OWN_MISTAKES}:
        return RuntimeError(f"MPI refused a call: {error}")
    return PeerLostError(f"lost a peer: {error}")


def duplicate(comm: Any) -> Any:
    """``comm.Dup()``. Raises PeerLostError."""
    from mpi4py import MPI

    try:
        return comm.Dup()
    except MPI.Exception as error:
        raise translate(error) from error


def agree(comm: Any, mine: bool) -> bool:
    """Whether ``mine`` holds on every rank of ``comm`` and none of them was lost; the same answer on all that live.

    ULFM's uniform agreement; it also works in a communicator that was revoked.
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
    """A new communicator of the ranks of ``comm`` that live, in the same order. Raises PeerLostError."""
    from mpi4py import MPI

    try:
        return comm.Shrink()  # Ishrink of Open MPI 5.0.11 ends in MPI_ERR_INTERN
    except MPI.Exception as error:
        raise translate(error) from error
