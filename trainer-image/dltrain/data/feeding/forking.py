"""Processes forked from a zygote, for a rank that must not fork itself.

A fork of a rank would have MPI's and CUDA's state, its locks as other threads held them, and every page that the rank
writes afterwards would be copied first. A fork of a zygote is a fresh interpreter with torch imported, in milliseconds
and mostly in shared memory. Under an agent it is the agent's, of which the rank was forked as well; else one of our
own. Either way the process is killed when the rank ends, however it ends: the kernel closes the rank's connection to
the zygote, or ends a zygote of its own, and with it what that has forked.
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
    """A Python command line, run in a fork of a zygote with a descriptor of ours."""

    def __init__(self, zygote: socket.socket, argv: Sequence[str], fd: int) -> None:
        """``zygote``: a connection of its own. ``fd``: a socket, which ``inherited.taken`` gets there.

        Raises OSError.
        """
        self._zygote = zygote
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}  # no rank of MPI
        order = json.dumps({"argv": list(argv), "env": env, "cwd": str(Path.cwd())}).encode() + b"\n"
        sent = socket.send_fds(zygote, [order], [2, fd])
        zygote.sendall(order[sent:])
        self._received = b""

    def fileno(self) -> int:
        """Readable when there is news of the process."""
        return self._zygote.fileno()

    def ended(self, within_s: float) -> Exit | None:
        """How it ended; None while it has not, and where its zygote is gone, too."""
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
        """Kill it if it runs."""
        self._zygote.close()


class WorkerForker:
    """A zygote and connections to it, one for each process to be forked."""

    def __init__(self, count: int) -> None:
        """Returns at once; what is ordered waits until the zygote has imported what it imports. Raises OSError."""
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
    """Connections to it; none if this process is no fork of it, for it may run another interpreter."""
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
