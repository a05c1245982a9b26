"""The operator as a fork of a process that has imported it already, and its planner as another.

Starts in new interpreters take 1.3 s of CPU time for the operator and 0.9 s for the planner.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import BinaryIO

from support.cluster.kubectl import ROOT
from support.cluster.operator_process import COMMAND, OperatorProcess
from support.trainer.ranks import STAND_IN, serving

ZYGOTE = """
import sys
own, sys.executable = sys.executable, sys.argv.pop()
import dljob.app.main  # Its command for the planner's process begins with sys.executable.
sys.executable = own
from dltrain.launch import zygote
zygote.main()
"""
PLANNER = """#!/bin/sh
exec {python} -I -S {stand_in} {socket} {code} $$ "$@"
"""
"""Script in the place of the interpreter that runs the planner."""


class ForkedOperator(OperatorProcess):
    """An operator of the checkout that runs as one in an interpreter of its own does."""

    def _spawn(self, log: BinaryIO) -> "Fork":
        return Fork(COMMAND, self._env, log)


class Fork:
    """A process that the zygote has forked, with the methods of ``subprocess.Popen`` that tests use.

    If this process ends, so does the fork.
    """

    def __init__(self, command: tuple[str, ...], env: dict[str, str], output: BinaryIO) -> None:
        """``command``: the arguments of the interpreter. ``output``: file for the standard output and error."""
        self._command = command
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_zygote())
        order = json.dumps({"argv": command, "env": env, "cwd": str(ROOT)}).encode() + b"\n"
        sent = socket.send_fds(self._connection, [order], [output.fileno()])
        self._connection.sendall(order[sent:])
        self._received = b""
        self.returncode: int | None = None
        self.pid = int(self._answer(None)["pid"])
        self._process = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit code, or None if the process has not ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code, which is negative for a signal."""
        if self.returncode is None:
            status = self._answer(timeout)["status"]
            self.returncode = os.waitstatus_to_exitcode(status)
            self._connection.close()
            os.close(self._process)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def _answer(self, timeout: float | None) -> dict[str, int]:
        """Return the zygote's next answer. Raise TimeoutExpired if there is none within ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._received:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self._command, timeout)
            data = self._connection.recv(4096)
            assert data, "the zygote of the operators has ended; expected an answer"
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, int] = json.loads(line)
        return answer


@cache
def _zygote() -> str:
    """Start the zygote of this process at the first call and return the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="dlo-", dir="/tmp")
    planner, code = Path(folder.name, "planner"), Path(__file__).with_name("forked_planner.py")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT / "trainer-image")]),
        "DLTRAIN_IMPORT_AHEAD": "off",
        "OPENBLAS_NUM_THREADS": "1",  # Forks have no other threads than that of the fork.
    }
    path = serving(folder, ZYGOTE, env, str(planner))
    planner.write_text(PLANNER.format(python=sys.executable, stand_in=STAND_IN, socket=path, code=code))
    planner.chmod(0o755)
    return path
