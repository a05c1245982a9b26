"""Decide which jobs may start now, and on which devices.

The modules cover the capacity of nodes, the resources that pods use and plans reserve, quotas of namespaces, the order
of the queue, preemption, and forecasts.

The package does no I/O and reads no clock: callers pass nodes, pods and times.
"""

from dljob.scheduling.backfill import RunningJob, Shadow, StartSearch, in_order_of_ends, shadow, start_in_s
from dljob.scheduling.book import ReservationBook
from dljob.scheduling.forecasting.forecast import Forecast, Recent, forecast
from dljob.scheduling.forecasting.free_nodes import Use
from dljob.scheduling.forecasting.queue_simulation import Holder, PossiblePlan, Shares, Waiter
from dljob.scheduling.forecasting.times import UNKNOWN, Interval, interval, start_up
from dljob.scheduling.gain import MIN_LEFT_S, Gain, gain
from dljob.scheduling.growth import Growth
from dljob.scheduling.ledger import BoundPod, Ledger, NodeCapacity
from dljob.scheduling.limits.charges import Charge, object_charge, pod_charge
from dljob.scheduling.limits.limit_ranges import LimitRange
from dljob.scheduling.limits.quotas import NO_LIMITS, NamespaceLimits, Overdraft, Quota, SharedQuotas, overdrafts
from dljob.scheduling.order import QueuedJob, QueuePolicy, dominant_share, latest_start
from dljob.scheduling.pace import (
    Move,
    Rest,
    move_reason,
    pace_changed,
    pace_deadline_s,
    rest_after_move,
    rest_with_measured,
)
from dljob.scheduling.preemption import PROTECTED_S, Preemptible, beside_running, victims
from dljob.scheduling.requests import NOTHING, Requests, amount, pod_requests
from dljob.scheduling.reservations import Reservation, without_reserved

__all__ = [
    "MIN_LEFT_S",
    "NOTHING",
    "NO_LIMITS",
    "PROTECTED_S",
    "UNKNOWN",
    "BoundPod",
    "Charge",
    "Forecast",
    "Gain",
    "Growth",
    "Holder",
    "Interval",
    "Ledger",
    "LimitRange",
    "Move",
    "NamespaceLimits",
    "NodeCapacity",
    "Overdraft",
    "PossiblePlan",
    "Preemptible",
    "QueuePolicy",
    "QueuedJob",
    "Quota",
    "Recent",
    "Requests",
    "Reservation",
    "ReservationBook",
    "Rest",
    "RunningJob",
    "Shadow",
    "SharedQuotas",
    "Shares",
    "StartSearch",
    "Use",
    "Waiter",
    "amount",
    "beside_running",
    "dominant_share",
    "forecast",
    "gain",
    "in_order_of_ends",
    "interval",
    "latest_start",
    "move_reason",
    "object_charge",
    "overdrafts",
    "pace_changed",
    "pace_deadline_s",
    "pod_charge",
    "pod_requests",
    "rest_after_move",
    "rest_with_measured",
    "shadow",
    "start_in_s",
    "start_up",
    "victims",
    "without_reserved",
]
