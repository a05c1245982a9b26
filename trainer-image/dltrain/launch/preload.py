"""Imports ahead what a rank needs, without starting MPI."""


def preload() -> None:
    """Import torch, mpi4py and the trainer, and load the MPI library. Reads no environment, starts no thread."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False

    from dltrain.comm.process_group import find_mpi

    find_mpi()
    # Strategies and encoders import late, since not every run needs them.
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401

    import dltrain.builtin.rank
    import dltrain.comm.schedules.engine  # noqa: F401
