"""From MPI's errors to ours: a peer that is gone, or a mistake of this program. Users: strategies on MPI, ``world``."""

from typing import Any

from dltrain.errors import PeerLostError

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
