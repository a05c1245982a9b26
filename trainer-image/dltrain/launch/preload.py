"""Import the modules that a rank needs, without starting MPI."""


def preload() -> None:
    """Import torch, mpi4py and the trainer, and load the MPI library. Do not read the environment or start threads.

    The zygote (``launch.zygote``) calls this once, so that the ranks that it forks need not import these modules.
    """
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False

    from dltrain.comm.process_group import find_mpi

    find_mpi()
    # dltrain imports these lazily, because not every run needs them.
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401

    import dltrain.builtin.rank
    import dltrain.comm.schedules.engine  # noqa: F401
