"""A stand-in for a process that Open MPI expects to start. The agent runs the real process.

The MPI daemon runs ``python -I -S shim.py rank`` instead of a rank, and mpirun runs ``… daemon HOST COMMAND`` instead
of ssh. The shim sends a request to the pod's agent over a Unix socket and waits. It ends like the real process, with
the same exit code or the same signal. If the shim is killed, its socket closes and the agent kills the real process.

The shim imports only a few modules of the standard library, because it runs once per rank and the CPU quota may be low:
under a quota of 0.2 CPUs, a second of CPU time takes five seconds.
"""

import _socket
import os
import sys

LOCAL_SOCKET_ENV = "DLTRAIN_LOCAL_SOCKET"
ATTEMPT_ENV = "DLTRAIN_ATTEMPT"
FORWARDED = ("OMPI_", "PMIX_", "PRTE_", "OPAL_PREFIX=", ATTEMPT_ENV)


def request(arguments: list[str], environ: dict[str, str]) -> bytes:
    """Encode a request to the pod's agent to start a process with ``arguments`` and the MPI variables of ``environ``.

    Format: length in bytes (8 digits), number of arguments, arguments, variables. Fields after the length end with NUL.
    """
    variables = [f"{name}={value}" for name, value in environ.items() if f"{name}=".startswith(FORWARDED)]
    body = "".join(field + "\0" for field in (str(len(arguments)), *arguments, *variables)).encode()
    return b"%08d" % len(body) + body


def parse_request(body: bytes) -> tuple[list[str], dict[str, str]]:
    """Return (arguments, environment variables) of the process that a request asks the agent to start.

    ``body``: the bytes that ``request`` returned, without the length at their start. Raise ValueError if they are
    malformed.
    """
    fields = body.decode().split("\0")[:-1]
    count = int(fields[0])
    variables = dict(field.partition("=")[::2] for field in fields[1 + count :])
    return fields[1 : 1 + count], variables


def main() -> None:
    path = os.environ.get(LOCAL_SOCKET_ENV)
    if path is None:
        sys.exit(f"shim: {LOCAL_SOCKET_ENV}: found nothing; expected a socket. Only dljob-agent starts the shim")
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
