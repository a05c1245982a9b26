"""Run real MPI ranks of this machine as forks of this process, which has imported torch.

The ranks of built-in jobs start in this way, too: as forks of the agent's interpreter. Importing torch takes seconds of
CPU time for each rank otherwise. This process must not compute anything with torch itself, because torch's threads do
not survive a fork.
"""

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from dltrain.launch import shim

LIMIT_S = 900.0


def run_forked(count: int, launcher: Sequence[str], rank: Callable[[], None], output: Path, **env: str) -> None:
    """Run ``rank`` in ``count`` forks, each with the MPI variables of a process that ``launcher`` starts.

    ``launcher``: the command of mpirun, without that of a rank. ``output``: file to which the ranks write. Raise
    SystemExit if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = f"{folder}/ranks"
        server.bind(path)
        server.listen(count)
        server.settimeout(LIMIT_S)
        command = [*launcher, sys.executable, "-I", "-S", str(shim.__file__), "rank"]
        environ = {**os.environ, **env, shim.LOCAL_SOCKET_ENV: path}
        with output.open("ab") as out, subprocess.Popen(command, env=environ, stdout=out, stderr=out) as starter:
            codes = _served(server, count, rank, output, env)
            starter.wait(LIMIT_S)
    if any(codes) or len(codes) < count:
        raise SystemExit(f"ranks exited with {codes}:\n{output.read_text(encoding='utf-8', errors='replace')}")


def _served(
    server: socket.socket, count: int, rank: Callable[[], None], output: Path, env: dict[str, str]
) -> list[int]:
    """Fork a rank for each of ``count`` connections. Return the exit codes of all ranks, and answer with them."""
    connections = dict[int, socket.socket]()
    for _ in range(count):
        connection, _ = server.accept()
        _, variables = shim.parse_request(_received(connection))
        if not (pid := os.fork()):
            _become(rank, output, env | variables)
        connections[pid] = connection
    codes = list[int]()
    with selectors.DefaultSelector() as selector:
        for pid in connections:
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        while len(codes) < count:
            for key, _ in selector.select():
                selector.unregister(key.fd)
                os.close(key.fd)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1]))
                with connections[key.data] as connection:
                    connection.sendall(b"exit %d\n" % (codes[-1] & 0xFF))
    return codes


def _received(connection: socket.socket) -> bytes:
    def read(length: int) -> bytes:
        found = b""
        while len(found) < length and (chunk := connection.recv(length - len(found))):
            found += chunk
        return found

    return read(int(read(8)))


def _become(rank: Callable[[], None], output: Path, env: dict[str, str]) -> None:
    """Run ``rank`` in this fork, and exit."""
    code = 1
    try:
        os.environ.update(env)
        with output.open("ab", buffering=0) as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        rank()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - any error ends the rank
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
