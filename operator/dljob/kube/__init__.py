"""Access to the Kubernetes API: observe and apply.

The package uses REST over aiohttp, without threads and without a generated client. Such a client would need most of an
idle operator's memory.
"""

from dljob.kube.cache import Cache, JobKey
from dljob.kube.client import Kube, RejectedError
from dljob.kube.rest import Api, ApiError
from dljob.kube.view import cluster_view
from dljob.kube.warning_events import WarningEvents

__all__ = ["Api", "ApiError", "Cache", "JobKey", "Kube", "RejectedError", "WarningEvents", "cluster_view"]
