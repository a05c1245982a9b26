"""Start, track and end long-running processes.

A process is identified by pid and start time, so that a signal never reaches another process with a reused pid. The
identity is recorded in the cluster's state, and the process's environment contains a marker of the cluster. With the
marker, processes that a killed `up` has started but not recorded can be found as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from devcluster.errors import ClusterError

MARKER = "DLJOB_CLUSTER_STATE"
_POLL_S = 0.02
_EXEC_LIMIT_S = 5.0


@dataclass(frozen=True)
class Identity:
    """Unique identity of a process. `start_ticks`: its start, in clock ticks since the boot with the id `boot_id`."""

    pid: int
    start_ticks: int
    boot_id: str


def boot_id() -> str:
    """Return the id of the machine's current boot, which is different after each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """Return the identity of the process `pid`, or None if it does not run or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the process name may contain spaces and parentheses
    if fields[0] in "ZX":
        return None
    return Identity(pid, int(fields[19]), boot_id())


def alive(identity: Identity) -> bool:
    """Return True if the process with this identity still runs."""
    return identify(identity.pid) == identity


def send(identity: Identity, number: signal.Signals) -> bool:
    """Send a signal to the process. Return False if it has ended.

    With a pidfd, the signal cannot reach another process that gets the same pid in between.
    """
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(identity):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = _POLL_S) -> bool:
    """Poll until `condition` returns True. Return False if it does not within `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(poll_s)
    return True


def end(identities: Iterable[Identity], grace_s: float) -> None:
    """End all processes: send SIGTERM and, after `grace_s` seconds, SIGKILL. Raise ClusterError if one still runs."""
    doomed = [one for one in identities if send(one, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)]
    if not wait_until(lambda: not any(map(_present, doomed)), grace_s):
        for one in doomed:
            send(one, signal.SIGKILL)
    if not wait_until(lambda: not any(map(_present, doomed)), 20):
        left = [one.pid for one in doomed if _present(one)]
        raise ClusterError(
            f"processes with the ids {left}: found them running 20 s after SIGKILL; expected them to end. See where "
            f"they hang with `cat /proc/{left[0]}/stack`"
        )


def _present(identity: Identity) -> bool:
    with suppress(ChildProcessError):  # waitpid reaps the process if it is a child of this one
        os.waitpid(identity.pid, os.WNOHANG)
    return alive(identity)


def children(pid: int) -> list[int]:
    """Return the pids of the direct children of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Registry:
    """The recorded processes of one cluster: a folder with one file per process, named after the process's role.

    `marker`: text in the environment variable MARKER of these processes, different for each cluster.
    """

    def __init__(self, folder: Path, marker: str) -> None:
        self._folder = folder
        self._marker = marker

    def start(
        self, name: str, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> Identity:
        """Start a process in its own session, so that Ctrl-C does not reach it, and record it under `name`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                env={**os.environ, **(env or {}), MARKER: self._marker},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
            )
        process.returncode = 0  # prevents a warning: the process continues after this command
        # Popen returns in the middle of execve, a moment before the kernel shows the new environment.
        wait_until(lambda: self._carries_marker(process.pid) or identify(process.pid) is None, _EXEC_LIMIT_S)
        identity = identify(process.pid)
        if identity is None:
            raise ClusterError(f"{name} ended at once: see {log}")
        record = self._folder / f"{name}.json"
        scratch = record.with_suffix(".new")
        scratch.write_text(json.dumps(asdict(identity)))
        scratch.replace(record)
        return identity

    def get(self, name: str) -> Identity | None:
        """Return the identity of the process with this name, or None if it does not run."""
        try:
            identity = Identity(**json.loads((self._folder / f"{name}.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return identity if alive(identity) else None

    def names(self) -> list[str]:
        """Return the names of all recorded processes, including those that have ended."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def end(self, names: Iterable[str], grace_s: float) -> None:
        """End these processes together, and delete their records."""
        listed = list(names)
        end([one for one in map(self.get, listed) if one], grace_s)
        for name in listed:
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def strays(self) -> Iterator[Identity]:
        """Yield every running process whose environment has this cluster's MARKER, recorded or not."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            identity = identify(int(entry.name)) if self._carries_marker(int(entry.name)) else None
            if identity:
                yield identity

    def _carries_marker(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{MARKER}={self._marker}".encode() in environment
