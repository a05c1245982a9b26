"""Starts real MPI ranks of a test body, under a deadline."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BODIES = Path(__file__).parent / "bodies"
MPIRUN = Path(sys.prefix) / "bin" / "mpirun"


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    """Standard output and error of all ranks."""


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without any MPI's or agent's, with the checkout importable, and ``extra``."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "DLTRAIN_"))}
    path = [str(ROOT / "operator"), str(ROOT / "trainer-image"), str(ROOT / "tests")]
    return ours | {"PYTHONPATH": os.pathsep.join(path)} | extra


def command(ranks: int, *arguments: str | Path, ulfm: bool = False) -> list[str]:
    """``mpirun`` of this Python on ``arguments``; more ranks than cores are fine."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    faults = ["--with-ft", "ulfm"] if ulfm else []
    place = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return [str(MPIRUN), *root, *faults, *place, "-n", str(ranks), sys.executable, *map(str, arguments)]


def start(arguments: list[str], **env: str) -> subprocess.Popen[str]:
    """The command in a session of its own, output to a pipe."""
    return subprocess.Popen(
        arguments,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], timeout_s: float) -> Ended:
    """Wait for it; past the deadline its whole session is killed and the test fails with what it printed."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not done after {timeout_s} s:\n{output}") from None
    return Ended(process.returncode, output)


def run(arguments: list[str], timeout_s: float = 60, **env: str) -> Ended:
    """``start`` and ``end``."""
    return end(start(arguments, **env), timeout_s)


def run_ranks(ranks: int, *arguments: str | Path, timeout_s: float = 60, ulfm: bool = False, **env: str) -> Ended:
    """``mpirun`` of a body; fails unless it ends with code 0."""
    ended = run(command(ranks, *arguments, ulfm=ulfm), timeout_s, **env)
    assert ended.code == 0, ended.output
    return ended
