"""Starts, tracks and ends long-running processes: by pid *and* start time, so that a recycled pid is never hit.

A process is known in two ways. Its identity is recorded in the cluster's state, and its environment carries the
cluster's marker: what a killed `up` left behind, perhaps unrecorded, is still found, and nothing else ever is.
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
    """One process for all time: `start_ticks` is its start in clock ticks since the boot called `boot_id`."""

    pid: int
    start_ticks: int
    boot_id: str


def boot_id() -> str:
    """Changes with every boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """The identity of a live process, or None where there is none (a zombie counts as none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
    if fields[0] in "ZX":
        return None
    return Identity(pid, int(fields[19]), boot_id())


def alive(identity: Identity) -> bool:
    """Whether this very process still runs."""
    return identify(identity.pid) == identity


def send(identity: Identity, number: signal.Signals) -> bool:
    """Signals this very process; False where it is gone. A pidfd rules out a pid reused in between."""
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
    """Polls until the condition holds; False where it does not within the limit."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(poll_s)
    return True


def end(identities: Iterable[Identity], grace_s: float) -> None:
    """SIGTERM, then after the grace SIGKILL, to all of them at once. Raises ClusterError where one survives that."""
    doomed = [one for one in identities if send(one, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)]
    if not wait_until(lambda: not any(map(_present, doomed)), grace_s):
        for one in doomed:
            send(one, signal.SIGKILL)
    if not wait_until(lambda: not any(map(_present, doomed)), 20):
        left = [one.pid for one in doomed if _present(one)]
        raise ClusterError(f"processes {left} survive SIGKILL: look at `cat /proc/{left[0]}/stack`")


def _present(identity: Identity) -> bool:
    with suppress(ChildProcessError):  # reaps it where it is a child of ours
        os.waitpid(identity.pid, os.WNOHANG)
    return alive(identity)


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Registry:
    """The processes of one cluster: a folder with one record each, named by the part that it plays."""

    def __init__(self, folder: Path, marker: str) -> None:
        self._folder = folder
        self._marker = marker

    def start(
        self, name: str, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> Identity:
        """Starts a process in a session of its own (so that Ctrl-C spares it) and records it."""
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
        process.returncode = 0  # it is meant to outlive this command: no warning when the object goes
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
        """The live process of that name, or None."""
        try:
            identity = Identity(**json.loads((self._folder / f"{name}.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return identity if alive(identity) else None

    def names(self) -> list[str]:
        """Every name on record, alive or not."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def end(self, names: Iterable[str], grace_s: float) -> None:
        """Ends these processes together, and forgets them."""
        listed = list(names)
        end([one for one in map(self.get, listed) if one], grace_s)
        for name in listed:
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def strays(self) -> Iterator[Identity]:
        """Every live process that carries this cluster's marker, recorded or not."""
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
