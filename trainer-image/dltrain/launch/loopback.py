"""The library that keeps the ports of mpirun and the MPI daemons closed to other pods, see ``loopback.c``.

The library is compiled when dltrain is built, for each of ``MACHINES``, because images have no compiler.
"""

import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
"""The processors, as ``uname -m`` names them, for which the library is compiled."""
REMEDY = "Install dltrain again, or run hack/env in a checkout"
_LOADED = "print(open('/proc/self/maps').read())"


@cache
def library() -> Path:
    """Return the path of the library that closes Open MPI's ports to other pods, built for this processor.

    Raise OSError if the library is missing or cannot be preloaded: without it, other pods could start processes
    through Open MPI's ports. The dynamic linker ignores a library that it cannot load, so the first call starts a
    process to check that the library is loaded.
    """
    path = Path(__file__).with_name(f"loopback-{platform.machine()}.so")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: found no such file; expected the library that closes Open MPI's ports to other pods, which "
            f"exists for {' and '.join(MACHINES)}. {REMEDY}"
        )
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LOADED],
        env={"LD_PRELOAD": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if path.name not in tried.stdout:
        raise OSError(f"{path}: found a library that cannot be preloaded ({tried.stderr.strip()}). {REMEDY}")
    return path
