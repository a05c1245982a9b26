"""Mutual TLS between the agents of one job: only holders of the job's Secret talk to each other.

The Secret's CA is the job's own, so "signed by it" means "belongs to this job"; names in certificates are not
looked at (one certificate serves all pods, whose names a re-plan may change).
"""

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """TLS contexts of an agent, as server and as client."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load(directory: Path) -> Identity:
    """Contexts from ca.crt, tls.crt and tls.key. Raises ValueError naming what is missing or unusable."""
    paths = [directory / name for name in ("ca.crt", "tls.crt", "tls.key")]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: not found; expected the job's TLS Secret to be mounted at {directory}")
    ca, certificate, key = paths
    contexts = []
    for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(side)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(ca)
            context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            raise ValueError(
                f"{directory}: unusable certificates ({error}); expected PEM, key and certificate of one pair"
            ) from error
        contexts.append(context)
    return Identity(*contexts)
