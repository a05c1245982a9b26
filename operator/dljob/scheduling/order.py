"""The order of the queue: which of the waiting jobs gets devices first.

Jobs of a higher priority come first. Among equal ones, jobs of the namespace come first that holds the smaller dominant
share of the cluster. Then older jobs come first. (Dominant share: Ghodsi et al., "Dominant Resource Fairness", NSDI
2011.)
"""

from dataclasses import dataclass
from datetime import datetime

from dljob.scheduling.requests import Requests


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """What the place of a job in the queue depends on.

    ``priority``: value of its PriorityClass. ``share``: dominant share of its namespace, from 0 to 1.
    """

    key: tuple[str, str]
    uid: str
    priority: int
    share: float
    created: datetime

    @property
    def urgency(self) -> tuple[int, float]:
        """Return the part of the place that does not depend on age. Smaller comes first."""
        return -self.priority, self.share

    @property
    def place(self) -> tuple[int, float, datetime, str]:
        """Return the sort key of the queue. It is a total order, because uids are unique."""
        return *self.urgency, self.created, self.uid


def dominant_share(held: Requests, total: Requests) -> float:
    """Return the largest share of a resource that ``held`` is of ``total``; 0 for resources that no node has."""
    pairs = ((held.devices, total.devices), (held.cpu_m, total.cpu_m), (held.memory_nbytes, total.memory_nbytes))
    return max((mine / whole for mine, whole in pairs if whole > 0), default=0.0)
