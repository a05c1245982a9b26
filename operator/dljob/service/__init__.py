"""The recommendation service: which plan a DLJob would get on a cluster, over HTTP."""

from dljob.service.server import MAX_NBYTES, Service

__all__ = ["MAX_NBYTES", "Service"]
