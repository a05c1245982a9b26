"""Who may start now, on which devices: the capacity of the nodes, what pods use of it, what plans reserve,
and the order of the queue.

The package does no I/O and reads no clock: callers pass nodes, pods and times.
"""

from dljob.scheduling.backfill import RunningJob, Shadow, StartSearch, in_order_of_ends, shadow, start_in_s
from dljob.scheduling.book import ReservationBook
from dljob.scheduling.growth import Growth
from dljob.scheduling.ledger import BoundPod, Ledger, NodeCapacity
from dljob.scheduling.order import QueuedJob, dominant_share
from dljob.scheduling.requests import NOTHING, Requests, amount, pod_requests
from dljob.scheduling.reservations import Reservation, without_reserved

__all__ = [
    "NOTHING",
    "BoundPod",
    "Growth",
    "Ledger",
    "NodeCapacity",
    "QueuedJob",
    "Requests",
    "Reservation",
    "ReservationBook",
    "RunningJob",
    "Shadow",
    "StartSearch",
    "amount",
    "dominant_share",
    "in_order_of_ends",
    "pod_requests",
    "shadow",
    "start_in_s",
    "without_reserved",
]
