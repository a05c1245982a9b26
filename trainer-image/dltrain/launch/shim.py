"""Stands where Open MPI expects a process, while the process itself is run by an agent.

Run as ``python -I -S shim.py rank`` by the MPI daemon in the place of a rank, and as ``… daemon HOST COMMAND`` by
mpirun in the place of ssh. It tells the pod's agent over its Unix socket, waits, and ends as the real process
ended: the same exit code, the same signal. Killing it kills the real process (the agent sees the socket close).

Standard library only and little of it: it runs once per rank on a quota where a second of CPU costs five.
"""

import _socket
import os
import sys

LOCAL_SOCKET_ENV = "DLTRAIN_LOCAL_SOCKET"
WORLD_ENV = "DLTRAIN_WORLD"
FORWARDED = ("OMPI_", "PMIX_", "PRTE_", "OPAL_PREFIX=", WORLD_ENV)


def request(arguments: list[str], environ: dict[str, str]) -> bytes:
    """Length (8 digits), count of arguments, the arguments, and the variables that MPI set; fields end with NUL."""
    variables = [f"{name}={value}" for name, value in environ.items() if f"{name}=".startswith(FORWARDED)]
    body = "".join(field + "\0" for field in (str(len(arguments)), *arguments, *variables)).encode()
    return b"%08d" % len(body) + body


def parse_request(body: bytes) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of a request without its length. Raises ValueError."""
    fields = body.decode().split("\0")[:-1]
    count = int(fields[0])
    variables = dict(field.partition("=")[::2] for field in fields[1 + count :])
    return fields[1 : 1 + count], variables


def main() -> None:
    path = os.environ.get(LOCAL_SOCKET_ENV)
    if path is None:
        sys.exit(f"shim: {LOCAL_SOCKET_ENV} is not set; it is started by dljob-agent, never by hand")
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(path)
    unsent = request(sys.argv[1:], dict(os.environ))
    while unsent:
        unsent = unsent[connection.send(unsent) :]
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    how, _, rest = answer.decode(errors="replace").partition(" ")
    number, _, text = rest.partition("\n")
    if text:
        os.write(2, text.encode())
    if how == "signal":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), int(number))
    sys.exit(int(number) if how == "exit" else 1)


if __name__ == "__main__":
    main()
