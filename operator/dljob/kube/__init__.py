"""Access to the Kubernetes API: observe the cluster and apply changes.

The package sends REST requests with aiohttp and uses neither threads nor a generated client. With a generated client,
most of the memory of an idle operator would belong to that client.
"""

from dljob.kube.answers import ApiError, RejectedError, Written
from dljob.kube.client import Kube
from dljob.kube.events.warning_events import WarningEvents
from dljob.kube.node_faults import NodeFaults
from dljob.kube.objects.cache import Cache
from dljob.kube.objects.store import JobKey
from dljob.kube.objects.view import cluster_view
from dljob.kube.ownership import rejected_object
from dljob.kube.plan_key import PlanKeySecret
from dljob.kube.rest import Api

__all__ = [
    "Api",
    "ApiError",
    "Cache",
    "JobKey",
    "Kube",
    "NodeFaults",
    "PlanKeySecret",
    "RejectedError",
    "WarningEvents",
    "Written",
    "cluster_view",
    "rejected_object",
]
