"""Why a running job moves, or does not, by an assignment of devices to all jobs together."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class RoomFor:
    """The reason why a running job moves to other or fewer devices: others gain more from the devices or the quota.

    ``by``: name of the first of these other jobs; empty if it is in another namespace. ``jobs``: their number.
    """

    by: str
    jobs: int

    def __str__(self) -> str:
        first = f"job {self.by}" if self.by else "a job of another namespace"
        return first + (f" and {self.jobs - 1} other job{'s' if self.jobs > 2 else ''}" if self.jobs > 1 else "")


@dataclass(frozen=True)
class Resting:
    """The reason why devices stay free that a running job could use: it has moved shortly before, and does not yet.

    ``until``: time at which it may move again. ``devices``: with which it would end sooner, such as '4 x Tesla-T4'.
    """

    until: datetime
    devices: str
