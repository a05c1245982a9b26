"""The recommendation service: the plan of a DLJob on a cluster, over HTTP."""

from dljob.service.server import MAX_NBYTES, Service

__all__ = ["MAX_NBYTES", "Service"]
