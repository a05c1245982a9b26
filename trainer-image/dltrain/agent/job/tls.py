"""Mutual TLS between the agents of one job. Only agents with the job's Secret can connect.

Each job has its own CA in its Secret, so every certificate signed by this CA belongs to the job. Host names in
certificates are not checked, because all pods share one certificate and a new plan can change their names.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

TUNNEL = "dltrain-mpi"
"""The application protocol (ALPN) of connections that agents forward for the MPI daemons."""


@dataclass(frozen=True)
class Identity:
    """The TLS contexts of an agent, as server and as client."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    tunnel: ssl.SSLContext
    """The context of a client that forwards connections of an MPI daemon."""


def load(directory: Path) -> Identity:
    """Return the TLS contexts of an agent, made from the files ca.crt, tls.crt and tls.key in ``directory``.

    Raise ValueError if a file is missing or invalid.
    """
    paths = [directory / name for name in ("ca.crt", "tls.crt", "tls.key")]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: found no file; expected the job's TLS Secret mounted at {directory}")
    ca, certificate, key = paths
    contexts = []
    server, client = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
    for side, protocols in ((server, [TUNNEL]), (client, []), (client, [TUNNEL])):
        context = ssl.SSLContext(side)
        if protocols:
            context.set_alpn_protocols(protocols)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(ca)
            context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            raise ValueError(
                f"{directory}: found invalid certificates ({error}); expected ca.crt and tls.crt in PEM format, "
                "and the key of tls.crt in tls.key. Correct the job's TLS Secret"
            ) from error
        contexts.append(context)
    return Identity(*contexts)
