"""What an assignment reads: the jobs, their places in line and their plans."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from dljob.controller.planning.parsed_objects import PlansByJob
from dljob.controller.planning.queueing import Queue
from dljob.kube import Cache, JobKey
from dljob.reconcile import ParsedJob


@dataclass(frozen=True, slots=True)
class PlanningState:
    """What an assignment reads.

    ``short``: returns the jobs that wait for the quotas of their namespaces, as they are planned. ``clock``: returns
    seconds that only grow. ``now``: returns the time of day.
    """

    cache: Cache
    queue: Queue
    plans: PlansByJob
    short: Callable[[], Mapping[JobKey, ParsedJob]]
    clock: Callable[[], float]
    now: Callable[[], datetime]
