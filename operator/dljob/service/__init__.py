"""The recommendation service: which plan a DLJob would get on a cluster, over HTTP."""

from dljob.service.server import MOST_NBYTES, Service

__all__ = ["MOST_NBYTES", "Service"]
