"""Start worker processes of a rank by forking them from a zygote.

A zygote is a process that has imported torch and does nothing else. A fork of the rank itself would inherit the state
of MPI and CUDA and locks of other threads, and the kernel would copy every page that the rank writes afterwards. A
fork of a zygote starts within milliseconds with torch imported, and shares most of its memory with the zygote.

If an agent started the rank, workers are forked from the agent's zygote, from which the rank was forked, too. Otherwise
the rank starts its own zygote. In both cases a worker is killed when its rank exits for any reason: the kernel closes
the rank's connection to the agent's zygote, or the rank's own zygote ends together with its children.
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
    """A process that was forked from a zygote to run a Python command line. It inherits one file descriptor.

    A zygote is a process that has imported torch and does nothing else, so that its forks start fast.
    """

    def __init__(self, zygote: socket.socket, argv: Sequence[str], fd: int) -> None:
        """Request the fork of this process from the zygote. Do not wait until it has started.

        ``zygote``: a connection to the zygote, for this child only. ``argv``: arguments of the Python interpreter.
        ``fd``: descriptor of a socket that the child gets. Raise OSError if the connection to the zygote is broken.
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
        """Return a descriptor that is readable when the process has started or ended, for ``poll`` or ``select``."""
        return self._zygote.fileno()

    def ended(self, within_s: float) -> Exit | None:
        """Wait up to ``within_s`` seconds and return how the process ended; None if it still runs.

        The result is also None if the zygote has ended, because nobody knows the exit status then.
        """
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
        """Close the connection to the zygote, which then kills the process if it still runs."""
        self._zygote.close()


class WorkerForker:
    """One connection per worker process to a zygote, the process from which workers are forked."""

    def __init__(self, count: int) -> None:
        """Open ``count`` connections to the agent's zygote or, if this rank cannot use it, to a new zygote.

        A new zygote may still import modules when this method returns. It answers requests when all imports are done.
        Raise OSError if a new zygote cannot be started.
        """
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
    """Return connections to the agent's zygote, or an empty list if this process was not forked from that zygote.

    A zygote from which this process was not forked may run another Python interpreter.
    """
    # The kernel keeps the zygote's command line for its forks. sys.orig_argv has that of the rank.
    started = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if started[1:3] != [b"-m", b"dltrain.launch.zygote"] or SOCKET_ENV not in os.environ:
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
