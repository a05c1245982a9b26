"""Who may start now, on which devices: the capacity of the nodes, what pods use of it, and what plans reserve.

The package does no I/O and reads no clock: callers pass nodes, pods and times.
"""

from dljob.scheduling.book import ReservationBook
from dljob.scheduling.gain import MIN_LEFT_S, Gain, gain
from dljob.scheduling.growth import Growth
from dljob.scheduling.ledger import BoundPod, Ledger, NodeCapacity
from dljob.scheduling.requests import NOTHING, Requests, amount, pod_requests
from dljob.scheduling.reservations import Reservation, without_reserved

__all__ = [
    "MIN_LEFT_S",
    "NOTHING",
    "BoundPod",
    "Gain",
    "Growth",
    "Ledger",
    "NodeCapacity",
    "Requests",
    "Reservation",
    "ReservationBook",
    "amount",
    "gain",
    "pod_requests",
    "without_reserved",
]
