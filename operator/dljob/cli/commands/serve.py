"""``dljob serve``: run the recommendation service, an HTTP server that returns the plan of a DLJob on a cluster."""

import argparse
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


def run(given: argparse.Namespace) -> int:
    view = files.cluster(given.cluster) if given.cluster is not None else None
    try:
        service = Service((given.host, given.port), view)
    except (OSError, OverflowError) as error:
        raise BadInputError(
            f"--host {given.host} --port {given.port}: found {error}; expected a local address and a free port"
        ) from None
    with service:
        host, port = service.server_address[:2]
        print(f"dljob serve: http://{host!s}:{port}/v1/plan", file=sys.stderr, flush=True)
        # shutdown() waits for serve_forever() to return, so a different thread than the serving one must call it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=service.shutdown).start())
        service.serve_forever()
    return 0
