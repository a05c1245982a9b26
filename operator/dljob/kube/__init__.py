"""The only user of the Kubernetes API: observe and apply.

Plain REST over the one aiohttp session that kopf watches with, too: no generated client, which would be the
larger part of an idle operator's memory, and no threads.
"""

from dljob.kube.cache import Cache, JobKey
from dljob.kube.client import Kube, RefusedError
from dljob.kube.rest import Api, ApiError
from dljob.kube.view import cluster_view
from dljob.kube.warning_events import WarningEvents

__all__ = ["Api", "ApiError", "Cache", "JobKey", "Kube", "RefusedError", "WarningEvents", "cluster_view"]
