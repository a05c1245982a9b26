"""Who may start now, on which devices: the capacity of the nodes, what pods use of it, what plans reserve, and
what the quotas of a namespace leave.

The package does no I/O and reads no clock: callers pass nodes, pods and times.
"""

from dljob.scheduling.book import ReservationBook
from dljob.scheduling.charges import Charge, object_charge, pod_charge
from dljob.scheduling.gain import MIN_LEFT_S, Gain, gain
from dljob.scheduling.growth import Growth
from dljob.scheduling.ledger import BoundPod, Ledger, NodeCapacity
from dljob.scheduling.limit_ranges import LimitRange
from dljob.scheduling.quotas import NO_LIMITS, NamespaceLimits, Quota
from dljob.scheduling.requests import NOTHING, Requests, amount, pod_requests
from dljob.scheduling.reservations import Reservation, without_reserved

__all__ = [
    "MIN_LEFT_S",
    "NOTHING",
    "NO_LIMITS",
    "BoundPod",
    "Charge",
    "Gain",
    "Growth",
    "Ledger",
    "LimitRange",
    "NamespaceLimits",
    "NodeCapacity",
    "Quota",
    "Requests",
    "Reservation",
    "ReservationBook",
    "amount",
    "gain",
    "object_charge",
    "pod_charge",
    "pod_requests",
    "without_reserved",
]
