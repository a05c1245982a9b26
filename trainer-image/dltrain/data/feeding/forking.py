"""Processes forked from a zygote, for a rank that must not fork itself.

A fork of a rank would inherit the state of MPI and CUDA and locks held by other threads, and the kernel would copy
every page that the rank writes afterwards. A fork of a zygote starts within milliseconds with torch imported, mostly in
shared memory. Under an agent, the agent's zygote is used, which also forked the rank. Otherwise the rank starts its own
zygote. In both cases the process is killed when the rank exits for any reason. The kernel then closes the rank's
connection to the agent's zygote, or ends the rank's own zygote together with its children.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dltrain.data.feeding.serialization import wait_for
from dltrain.host.processes import Exit
from dltrain.protocol.rank_messages import SOCKET_ENV


class Child:
    """A Python command line that runs in a fork of a zygote and inherits a descriptor."""

    def __init__(self, zygote: socket.socket, argv: Sequence[str], fd: int) -> None:
        """Request the fork. ``zygote``: a connection for this child only. ``fd``: a socket, which the child receives.

        Raises OSError.
        """
        self._zygote = zygote
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))
        }  # the child is no MPI rank
        order = json.dumps({"argv": list(argv), "env": env, "cwd": str(Path.cwd())}).encode() + b"\n"
        sent = socket.send_fds(zygote, [order], [2, fd])
        zygote.sendall(order[sent:])
        self._received = b""

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has started or ended."""
        return self._zygote.fileno()

    def ended(self, within_s: float) -> Exit | None:
        """Return how the process ended; None if it still runs, or if its zygote has died as well."""
        while self._received.count(b"\n") < 2 and wait_for(self._zygote, within_s=within_s):
            try:
                data = self._zygote.recv(4096)
            except ConnectionError:
                data = b""
            if not data:
                break
            self._received += data
        lines = self._received.split(b"\n")
        return Exit.of(json.loads(lines[1])["status"]) if len(lines) > 2 else None

    def close(self) -> None:
        """Kill the process if it runs."""
        self._zygote.close()


class WorkerForker:
    """A zygote, and a connection to it for each process to fork."""

    def __init__(self, count: int) -> None:
        """Connect to a zygote or start one. Do not wait for its imports; requests wait for them. Raises OSError."""
        self._own: subprocess.Popen[bytes] | None = None
        self.connections: list[socket.socket] = []
        self.connections = _agents_zygote(count) or self._start(count)

    def _start(self, count: int) -> list[socket.socket]:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/zygote")
            listener.listen(count)
            fd = listener.fileno()
            argv = (sys.executable, "-m", "dltrain.launch.zygote", str(fd), str(os.getpid()))
            self._own = subprocess.Popen(argv, pass_fds=(fd,), stdin=subprocess.DEVNULL)
            try:
                return _connected(f"{folder}/zygote", count)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        if self._own is not None:
            self._own.kill()
            self._own.wait()


def _agents_zygote(count: int) -> list[socket.socket]:
    """Return connections to the agent's zygote, or an empty list if the zygote has not forked this process.

    A zygote that has not forked this process may run another interpreter.
    """
    if sys.orig_argv[1:3] != ["-m", "dltrain.launch.zygote"] or SOCKET_ENV not in os.environ:
        return []
    try:
        return _connected(str(Path(os.environ[SOCKET_ENV]).with_name("zygote.sock")), count)
    except OSError:
        return []


def _connected(path: str, count: int) -> list[socket.socket]:
    made = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    for connection in made:
        connection.connect(path)
    return made
