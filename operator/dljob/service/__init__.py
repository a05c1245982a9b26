"""The recommendation service: an HTTP server that returns the plan of a DLJob on a cluster."""

from dljob.service.server import MAX_NBYTES, Service

__all__ = ["MAX_NBYTES", "Service"]
