"""Programs that replace mpirun and similar launchers for the ranks of an MPI program: they print an error and fail.

A script that a rank runs may call mpirun, which the agent cannot see in the command. Every rank would then start all
ranks once more. These programs come first on the PATH of the ranks.
"""

from pathlib import Path

from dlcontract import EXIT_BAD_INPUT
from dltrain.launch.mpi_launchers import MPI_LAUNCHERS

_PROGRAM = f"""#!/bin/sh
echo "trainer.command: found ${{0##*/}} in a program that every rank runs; expected the program alone, because dljob" \\
  "starts each rank itself and every rank would start all ranks once more. Start the program without ${{0##*/}}" >&2
exit {EXIT_BAD_INPUT}
"""


def refused_launchers(run_dir: Path) -> Path:
    """Return the folder of the programs that replace launchers.

    ``run_dir``: the agent's directory for sockets and temporary files.
    """
    return run_dir / "refused-launchers"


def write_refused_launchers(run_dir: Path) -> None:
    """Write the programs that replace launchers, such as mpirun, to their folder, unless they exist.

    ``run_dir``: the agent's directory for sockets and temporary files.
    """
    folder = refused_launchers(run_dir)
    folder.mkdir(exist_ok=True)
    for name in MPI_LAUNCHERS:
        if not (folder / name).exists():
            (folder / name).write_text(_PROGRAM)
            (folder / name).chmod(0o755)
