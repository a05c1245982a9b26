"""The library that keeps the ports of mpirun and the MPI daemons closed to other pods, see ``loopback.c``.

The library is compiled when dltrain is built, for each of ``MACHINES``, because images have no compiler.
"""

import platform
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
"""The processors, as ``uname -m`` names them, for which the library is compiled."""


def library(machine: str | None = None) -> Path:
    """Return the library's path for a processor (default: that of this computer).

    Raise OSError if it is missing: without it, other pods could start processes through Open MPI's ports.
    """
    path = Path(__file__).with_name(f"loopback-{machine or platform.machine()}.so")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: found no such file; expected the library that closes Open MPI's ports to other pods, which "
            f"exists for {' and '.join(MACHINES)}. Install dltrain again, or run hack/env in a checkout"
        )
    return path
