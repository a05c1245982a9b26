"""The injected agent: an agent that brings its own Python and C library into a pod with any image.

The trainer image holds the agent's files in ``SOURCE``; ``trainer-image/injection/tree.py`` builds them. An init
container copies them to the volume ``AGENT_DIR`` of the pod: ``python -m dltrain.launch.injected TARGET``. The agent
then starts from there. It runs the commands of the ranks with the programs of the image alone.
"""

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from dlcontract import EXIT_BAD_INPUT

FOR_RANKS = Path(sys.prefix) / "for-ranks"
"""The folder with dltrain for the Python of the ranks. It exists only beside an injected agent."""


def is_injected() -> bool:
    """Return True if this process runs in the Python of an injected agent, which has neither torch nor mpi4py."""
    return FOR_RANKS.is_dir()


def ranks_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank beside an injected agent gets. ``base``: the rank's other variables.

    Its Python finds dltrain, and writes its output at once, as in the trainer image.
    """
    found = {"PYTHONPATH": os.pathsep.join(filter(None, (base.get("PYTHONPATH"), str(FOR_RANKS))))}
    return found if "PYTHONUNBUFFERED" in base else {**found, "PYTHONUNBUFFERED": "1"}


def install(source: Path, target: Path) -> int:
    """Copy the agent's files from ``source`` into the existing directory ``target``. Return the number of bytes.

    Every user can read the copies and execute the programs. The directory itself, which belongs to Kubernetes, stays as
    it is. Raise OSError if a file cannot be copied, for example because the volume is full.
    """
    nbytes = 0
    for folder, folders, files in os.walk(source):
        to = target / Path(folder).relative_to(source)
        for name in folders:
            (to / name).mkdir(exist_ok=True)
            (to / name).chmod(0o755)
        for name in files:
            original = Path(folder) / name
            mode = 0o755 if original.stat().st_mode & 0o100 else 0o644
            shutil.copyfile(original, to / name)
            (to / name).chmod(mode)
            nbytes += original.stat().st_size
    return nbytes


def main() -> None:
    """Copy the files of the agent in whose Python this runs to the directory that the command line names."""
    if len(sys.argv) != 2 or not is_injected():
        _say(f"{sys.executable}: found {sys.argv[1:]}; expected one directory, and the Python of an injected agent")
        sys.exit(EXIT_BAD_INPUT)
    begun_s = time.monotonic()
    try:
        nbytes = install(Path(sys.prefix), Path(sys.argv[1]))
    except OSError as error:
        _say(f"{sys.argv[1]}: cannot copy the agent: {error}. Check the free disk space of the node")
        sys.exit(1)
    _say(f"copied the agent to {sys.argv[1]}: {nbytes / 1e6:.0f} MB in {time.monotonic() - begun_s:.1f} s")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
