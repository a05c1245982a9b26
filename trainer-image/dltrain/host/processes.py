"""Start processes and reap all children of an agent.

An agent is PID 1 of its container, so every orphan becomes its child and must be reaped. asyncio's child watcher would
compete for the same children. So a single SIGCHLD handler reaps all children, and resolves the futures of the processes
that this module started.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOPPED_S = 4.0
"""Minimum time in seconds for which a process must be stopped (as by SIGSTOP) before it is reported. With a poll every
0.5 s, the report comes within 5 s."""
KILLED_S = 20.0
"""Minimum time in seconds for which a process must exist after SIGKILL before it is reported."""
LOADER_PROCESS = "pt_data_worker"
"""Name that PyTorch (2.5 and newer) gives the processes of a DataLoader with num_workers."""
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Exit:
    """The exit status of a process. Exactly one of ``code`` and ``signal`` is set."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, status: int) -> "Exit":
        """Return the exit status that a status of ``waitpid`` encodes."""
        if os.WIFSIGNALED(status):
            return cls(signal=os.WTERMSIG(status))
        return cls(code=os.WEXITSTATUS(status))

    @property
    def shell_code(self) -> int:
        """The exit code as a shell shows it: 128 + n for signal n."""
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
    """A process that leads its own session. The future ``ended`` resolves to the exit status when the process ends."""

    pid: int
    ended: "asyncio.Future[Exit]" = field(repr=False)
    killed: bool = False
    """True if the process got SIGKILL from ``kill``."""
    _is_asked: bool = False
    """True if the process got SIGTERM from ``terminate``."""

    def send(self, number: int) -> None:
        """Send a signal to the process and its group. Do nothing if it has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def send_alone(self, number: int) -> None:
        """Send a signal to the process, but not to its children."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to the process and its group, but not to the processes of PyTorch's data loaders.

        A script that saves its state after the current step still needs them for this step. They end with the script.

        Further calls do nothing. While Python ends after the first signal, its handlers are gone, so that a second one
        would kill a script that is about to exit with code 0.
        """
        if self.ended.done() or self._is_asked:
            return
        self._is_asked = True
        members = [(pid, name == LOADER_PROCESS) for pid, name, group in _processes() if group == self.pid]
        if not any(loads for _, loads in members):
            self.send(signal.SIGTERM)  # In one call, so that a process that starts now is not missed.
            return
        for pid, loads in members:
            if not loads:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        self.killed = True
        self.send(signal.SIGKILL)


class StoppedProcesses:
    """Detect processes that a signal such as SIGSTOP has stopped.

    The states are read from /proc, because the reaper's ``waitpid`` reports only the end of a process.
    """

    def __init__(self) -> None:
        self._since: dict[Process, float] = {}

    def poll(self, processes: Iterable[Process], now_s: float) -> dict[Process, float]:
        """Return {process: seconds stopped} for processes that have been stopped for at least ``STOPPED_S``.

        ``now_s``: time of a monotonic clock.
        """
        self._since = {each: self._since.get(each, now_s) for each in processes if _stopped(each.pid)}
        return {each: now_s - since for each, since in self._since.items() if now_s - since >= STOPPED_S}


class KilledProcesses:
    """Detect processes that still exist long after SIGKILL. Most of them wait for a volume or a device (state D)."""

    def __init__(self) -> None:
        self._since: dict[Process, float] = {}

    def poll(self, processes: Iterable[Process], now_s: float) -> dict[Process, str]:
        """Return {process: its state, such as "D"} for processes that have not ended ``KILLED_S`` after SIGKILL.

        Return each of them again after further ``KILLED_S``. ``now_s``: time of a monotonic clock.
        """
        killed = [each for each in processes if each.killed and not each.ended.done()]
        self._since = {each: self._since.get(each, now_s) for each in killed}
        found = {each: _state(each.pid) for each, since in self._since.items() if now_s - since >= KILLED_S}
        self._since |= dict.fromkeys(found, now_s)
        return found


class StarvedProcesses:
    """Detect processes that are ready to run but get too little processor time."""

    SHARE = 0.25
    """A process is starved if it waits for a processor for more than this fraction of the time between two polls."""

    def __init__(self) -> None:
        self._before: dict[Process, tuple[float, float]] = {}

    def poll(self, processes: Iterable[Process], now_s: float) -> dict[Process, float]:
        """Return {process: seconds} for the processes that waited too long for a processor since the last poll.

        A process waited too long if it was ready to run, but got no processor, for more than ``SHARE`` of the time
        between the polls. Only its main thread counts. The first poll of a process never returns it. ``now_s``: time of
        a monotonic clock.
        """
        before = self._before
        self._before = {each: (now_s, waited_s) for each in processes if (waited_s := _waited_s(each.pid)) is not None}
        found = {}
        for each, (_, waited_s) in self._before.items():
            since_s, earlier_s = before.get(each, (now_s, waited_s))
            if waited_s - earlier_s > self.SHARE * (now_s - since_s):
                found[each] = waited_s - earlier_s
        return found


def _waited_s(pid: int) -> float | None:
    """Return the total time, in seconds, for which the main thread of a process has waited for a processor.

    The thread was ready to run during this time. Return None if the process has ended or the kernel does not record the
    time.
    """
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return None
    return int(fields[1]) / 1e9 if len(fields) > 1 else None


def _stopped(pid: int) -> bool:
    """Return True if job control (such as SIGSTOP) has stopped a process. A process under a debugger does not count."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    """Return the state of a process, as the letter in /proc/PID/stat; empty if there is no such process."""
    _, fields = _status(pid)
    return fields[0] if fields else ""


def _processes() -> Iterator[tuple[int, str, int]]:
    """Yield (PID, name, process group) of each process that /proc shows."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            name, fields = _status(int(entry.name))
            if fields:
                yield int(entry.name), name, int(fields[2])


def _status(pid: int) -> tuple[str, list[str]]:
    """Return (name, fields from the state on) of /proc/PID/stat; empty ones if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", []
    head, _, rest = stat.rpartition(")")
    return head.partition("(")[2], rest.split()


class Reaper:
    """Start processes and reap all children of this process. Create one per event loop, in the main thread."""

    def __init__(self) -> None:
        self._ends: dict[int, asyncio.Future[Exit]] = {}
        self._loop = asyncio.get_running_loop()
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # Adopt orphans even if this process is not PID 1.
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
        """Start ``argv`` in its own session. Send its output to the descriptor ``output``; None: this process's output.

        ``pass_fds``: further descriptors that the process inherits. ``cwd``: its directory; None: that of this process.
        The kernel kills the process when this process dies. Raise OSError if it cannot be started.
        """
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd,
            start_new_session=True, pass_fds=pass_fds, preexec_fn=_die_with_parent,
        )  # fmt: skip
        child.returncode = 0  # Reaped by _reap, not by Popen.
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
                    os.killpg(pid, signal.SIGKILL)  # Kill processes that the ended process left in its group.
                ended.set_result(Exit.of(status))


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
