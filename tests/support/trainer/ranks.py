"""Starts real MPI ranks of a test body, under a deadline.

They are forks of one zygote, as in a pod: importing torch took most of a test's time. A rank is a process of its own all
the same, and leaves nothing behind for the next one. What users start by hand starts from nothing here, too (``fresh``).
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BODIES = Path(__file__).parent / "bodies"
MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
STAND_IN = Path(__file__).with_name("stand_in.py")
AHEAD = """
import hypothesis, safetensors.torch, torch._dynamo, support.trainer.bodies.harness
from dltrain.launch import zygote
zygote.main()
"""


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    """Standard output and error of all ranks."""


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without any MPI's or agent's, with the checkout importable, and ``extra``."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "DLTRAIN_"))}
    path = [str(ROOT / "operator"), str(ROOT / "operator/contract"), str(ROOT / "trainer-image"), str(ROOT / "tests")]
    return ours | {"PYTHONPATH": os.pathsep.join(path)} | extra


@cache
def zygote() -> str:
    """The path of the socket of this process's zygote, started when first needed."""
    folder = tempfile.TemporaryDirectory(prefix="dlt-", dir="/tmp")
    path = f"{folder.name}/zygote"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        number = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", AHEAD, str(number)],
            env=environment(MPI4PY_MPIABI="openmpi"),
            stdin=subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,
        )

    def finish() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(finish)
    return path


def command(ranks: int, *arguments: str | Path, ulfm: bool = False, fresh: bool = False) -> list[str]:
    """``mpirun`` of Python on ``arguments``, with the agent's transports; more ranks than cores are fine.

    ``fresh``: as a user would start it, in new interpreters and with Open MPI's own choices.
    """
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    faults = ["--with-ft", "ulfm"] if ulfm else []
    place = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    python = [sys.executable] if fresh else [sys.executable, "-I", "-S", str(STAND_IN), zygote()]
    agents = [] if fresh else ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]  # to look at libfabric takes 1 s
    return [str(MPIRUN), *root, *faults, *place, *agents, "-n", str(ranks), *python, *map(str, arguments)]


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


def run(arguments: list[str], timeout_s: float = 120, **env: str) -> Ended:
    """``start`` and ``end``."""
    return end(start(arguments, **env), timeout_s)


def run_ranks(ranks: int, *arguments: str | Path, timeout_s: float = 120, ulfm: bool = False, **env: str) -> Ended:
    """``mpirun`` of a body; fails unless it ends with code 0."""
    ended = run(command(ranks, *arguments, ulfm=ulfm), timeout_s, **env)
    assert ended.code == 0, ended.output
    return ended
