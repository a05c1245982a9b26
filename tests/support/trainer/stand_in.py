"""The process that mpirun starts as a rank, while the rank itself is a fork of the tests' zygote.

Run as ``python -I -S stand_in.py SOCKET ARGUMENTS…``. The rank gets the arguments after the interpreter, and the
environment, working directory and output of this process. This process forwards SIGTERM. If it is killed, so is the
rank, and it exits with the rank's status.
"""

import _socket
import contextlib
import json
import os
import resource
import signal
import sys
from types import FrameType


def main(path: str, *arguments: str) -> None:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(path)
    order = json.dumps({"argv": arguments, "env": dict(os.environ), "cwd": str(os.getcwd())}).encode() + b"\n"  # noqa: PTH109
    output = (1).to_bytes(4, sys.byteorder)
    sent = connection.sendmsg([order], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, output)])
    while sent < len(order):
        sent += connection.send(order[sent:])
    answers = b""
    while chunk := connection.recv(4096):
        answers += chunk
        if answers.count(b"\n") == 1:
            pid = json.loads(answers)["pid"]

            def forward(number: int, frame: FrameType | None, pid: int = pid) -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

            signal.signal(signal.SIGTERM, forward)
    *_, last = answers.splitlines() or [b"{}"]
    status = json.loads(last).get("status")
    if status is None:
        sys.exit("stand_in: the zygote has ended, expected the status of a rank")
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


main(*sys.argv[1:])
