"""``dljob serve``: run the recommendation service, an HTTP server that returns the plan of a DLJob on a cluster."""

import argparse
import errno
import signal
import sys
import threading

from dljob.client import files
from dljob.client.errors import BadInputError
from dljob.service import Service


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "serve",
        help="answer POST /v1/plan over HTTP",
        description='Serve the planner over HTTP: POST /v1/plan with {"job": MANIFEST, "cluster": {"nodes": [...]}} '
        "returns the plan as JSON, and GET /healthz returns ok. The service has no TLS and no authentication: put it "
        "behind a proxy that provides both.",
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    command.add_argument("--port", type=int, default=8470, help="port to listen on; 0: any (default: %(default)s)")
    command.add_argument("--cluster", metavar="FILE", help="file with the cluster for requests that contain none")
    command.set_defaults(run=run)


MAX_PORT = 65_535


def run(given: argparse.Namespace) -> int:
    view = files.cluster(given.cluster) if given.cluster is not None else None
    if not 0 <= given.port <= MAX_PORT:
        raise BadInputError(f"--port: found {given.port}; expected 0 to {MAX_PORT}. Choose such a port, or 0 for any")
    try:
        service = Service((given.host, given.port), view)
    except OSError as error:
        raise BadInputError(_in_words(error, given.host, given.port)) from None
    with service:
        host, port = service.server_address[:2]
        print(f"dljob serve: http://{host!s}:{port}/v1/plan", file=sys.stderr, flush=True)
        # shutdown() waits for serve_forever() to return, so a different thread than the serving one must call it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=service.shutdown).start())
        service.serve_forever()
    return 0


def _in_words(error: OSError, host: str, port: int) -> str:
    """Return the message for an address on which the service cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"--port: found {port}, on which another process listens at {host}; expected a free port. Choose another "
            "one, or 0 for any"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"--port: found {port}, which this user may not use; expected 1024 or more. Choose another one"
    reason = (error.strerror or str(error)).lower()
    return f"--host: found {host} ({reason}); expected an address of this machine. Correct it, or use 127.0.0.1"
