"""Start real MPI ranks of a test program with a time limit.

The ranks are forks of one zygote, as in a pod, because importing torch would take most of a test's time. Each rank is
still its own process and does not affect later ones. Programs that users start by hand get new interpreters (``fresh``).
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BODIES = Path(__file__).parent / "bodies"
SPEAKING = str(BODIES / "faults/speaking_rank.py")
MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
STAND_IN = Path(__file__).with_name("stand_in.py")
ZYGOTE = """
import hypothesis, safetensors.torch, torch._dynamo, support.trainer.bodies.harness
from dltrain.launch import zygote
from support.trainer.bodies import quick_end
try:
    zygote.main()
except SystemExit as end:
    if end.code:
        raise
quick_end.end()
"""
APART = """
import os, sys
from dltrain.launch import zygote
errors, own, *argv = sys.argv[1:]
os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
sys.path[:] = [*path, *(entry for entry in sys.path if entry and entry not in own.split(os.pathsep))]
zygote.run(zygote.Order(tuple(argv), {}, os.getcwd()))
"""
"""Code that gives a fork a standard error and a search path for modules of its own, and then runs a command line."""


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    """Standard output and error of all ranks."""


def environment(**extra: str) -> dict[str, str]:
    """Return the environment without variables of MPI or the agent, with the checkout importable, and with ``extra``."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "DLTRAIN_"))}
    path = [str(ROOT / "operator"), str(ROOT / "operator/contract"), str(ROOT / "trainer-image"), str(ROOT / "tests")]
    return inherited | {"PYTHONPATH": os.pathsep.join(path), "PRTE_MCA_prte_tmpdir_base": sessions()} | extra


@cache
def sessions() -> str:
    """Make a folder for the files of each mpirun of this process, and return its path.

    mpirun names its own folder by its process id, and a killed one leaves it. Another mpirun with this id cannot start
    beside its files.
    """
    folder = tempfile.TemporaryDirectory(prefix="mpi-", dir="/tmp", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return folder.name


@cache
def zygote() -> str:
    """Start the zygote of this process at the first call and return the path of its socket."""
    return serving(tempfile.TemporaryDirectory(prefix="dlt-", dir="/tmp"), ZYGOTE, environment(MPI4PY_MPIABI="openmpi"))


def serving(folder: "tempfile.TemporaryDirectory[str]", code: str, env: dict[str, str], *arguments: str) -> str:
    """Start a zygote and return the path of its socket in ``folder``. Both end with this process.

    ``code``: its program, whose arguments are the number of the listening socket and ``arguments``. ``env``: its
    environment.
    """
    path = f"{folder.name}/zygote"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        number = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(number), *arguments],
            env=env,
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
    """Return an ``mpirun`` command of Python on ``arguments`` with the agent's transports, which may oversubscribe cores.

    With ``fresh``, it uses new interpreters and Open MPI's default transports, as if a user started it.
    """
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    faults = ["--with-ft", "ulfm"] if ulfm else []
    place = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    python = [sys.executable] if fresh else alone()
    transports = [] if fresh else ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]  # probing libfabric takes 1 s
    return [str(MPIRUN), *root, *faults, *place, *transports, "-n", str(ranks), *python, *map(str, arguments)]


def alone(*arguments: str | Path) -> list[str]:
    """Return a command of Python on ``arguments`` without MPI. Its process is a fork of the zygote."""
    return [sys.executable, "-I", "-S", str(STAND_IN), zygote(), *map(str, arguments)]


def run_apart(
    *arguments: str | Path, env: Mapping[str, str], cwd: Path | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run Python on ``arguments`` like an interpreter with ``env``, in a fork of the zygote.

    Its standard output and error are apart, and it can import the installed packages and those in PYTHONPATH alone.
    """
    with tempfile.NamedTemporaryFile("r") as errors:
        command = alone("-c", APART, errors.name, environment()["PYTHONPATH"], *arguments)
        ended = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        ended.stderr = errors.read()
    return ended


def start(arguments: list[str], **env: str) -> subprocess.Popen[str]:
    """Start the command in a new session with its output in a pipe."""
    return subprocess.Popen(
        arguments,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], timeout_s: float) -> Ended:
    """Wait for the process. After the time limit, kill its session and raise AssertionError with its output."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not finished after {timeout_s} s:\n{output}") from None
    return Ended(process.returncode, output)


def run(arguments: list[str], timeout_s: float = 120, **env: str) -> Ended:
    """Start the command and wait for its end."""
    return end(start(arguments, **env), timeout_s)


def run_ranks(ranks: int, *arguments: str | Path, timeout_s: float = 120, ulfm: bool = False, **env: str) -> Ended:
    """Run a test program on ranks and raise AssertionError unless it exits with code 0."""
    ended = run(command(ranks, *arguments, ulfm=ulfm), timeout_s, **env)
    assert ended.code == 0, ended.output
    return ended


def speaking(*arguments: str) -> list[str]:
    """Return the command of a rank that talks to its agent without torch. ``arguments``: see ``bodies/faults/speaking_rank.py``."""
    return ["python", SPEAKING, *arguments]
