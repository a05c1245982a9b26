"""Processes that an agent starts or adopts: the one place that waits for children.

An agent is PID 1 of its container, so every orphan becomes its child and must be reaped; asyncio's own child
watching would race with that. Here one SIGCHLD handler reaps all, and resolves the futures of the processes
that were started here.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOPPED_S = 4.0
"""Of a stop that lasts: with looks every half second it is noticed within five."""
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Exit:
    """How a process ended: exactly one of the two is set."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, status: int) -> "Exit":
        """From the status of waitpid."""
        if os.WIFSIGNALED(status):
            return cls(signal=os.WTERMSIG(status))
        return cls(code=os.WEXITSTATUS(status))

    @property
    def shell_code(self) -> int:
        """As a shell shows it: 128 + n for a signal n."""
        return 128 + self.signal if self.signal is not None else self.code or 0

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"signal {self.signal}"


@dataclass(eq=False)
class Process:
    """A running process, leader of its own session; ``ended`` resolves when it is gone."""

    pid: int
    ended: "asyncio.Future[Exit]" = field(repr=False)

    def send(self, number: int) -> None:
        """A signal to the process and its group; nothing if it has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def send_alone(self, number: int) -> None:
        """A signal to the process, and not to its children."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


class Stillness:
    """How long processes have stood still, stopped by a signal: nothing else can be heard of that by who waits."""

    def __init__(self) -> None:
        self._since: dict[Process, float] = {}

    def look(self, processes: Iterable[Process], now_s: float) -> dict[Process, float]:
        """Those that have been seen stopped for ``STOPPED_S`` or longer, and for how long; ``now_s`` by any clock."""
        self._since = {each: self._since.get(each, now_s) for each in processes if _stopped(each.pid)}
        return {each: now_s - since for each, since in self._since.items() if now_s - since >= STOPPED_S}


def _stopped(pid: int) -> bool:
    """Whether a process is stopped by job control (SIGSTOP); one under a debugger is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


class Reaper:
    """Starts processes and reaps all children of this process. One an event loop, in its main thread."""

    def __init__(self) -> None:
        self._ends: dict[int, asyncio.Future[Exit]] = {}
        self._loop = asyncio.get_running_loop()
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come to us also where we are not PID 1
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: int | None = None,
        pass_fds: Sequence[int] = (),
        cwd: str | None = None,
    ) -> Process:
        """Start ``argv`` in a session of its own, its output to the descriptor ``output`` (default: ours).

        It is killed when this process dies. Raises OSError where it cannot be started.
        """
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd,
            start_new_session=True, pass_fds=pass_fds, preexec_fn=_die_with_parent,
        )  # fmt: skip
        child.returncode = 0  # reaped here, not by Popen
        ended: asyncio.Future[Exit] = self._loop.create_future()
        self._ends[child.pid] = ended
        return Process(child.pid, ended)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (ended := self._ends.pop(pid, None)) is not None and not ended.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # whatever it left behind in its group
                ended.set_result(Exit.of(status))


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
