"""What an assignment of devices to all jobs together says about one job: its devices, and the order to move to them."""

from dataclasses import dataclass
from datetime import datetime

from dljob.cluster import ClusterView
from dljob.controller.planning.growing import usable_nodes
from dljob.reconcile import ParsedJob
from dljob.scheduling.assignment import Option
from dljob.scheduling.assignment.reasons import RoomFor
from dljob.scheduling.parts import left_for, part_of


@dataclass(frozen=True)
class Share:
    """The devices on which a job is planned, as a result of an assignment.

    ``part``: the devices that are assigned to the job. None: the job may use what the parts of ``others`` leave.
    ``overdue``: as in ``Candidate``.
    """

    part: Option | None
    others: tuple[Option, ...] = ()
    overdue: bool = False

    def of(self, view: ClusterView, question: ParsedJob) -> ClusterView:
        """Return ``view`` with only the nodes and free devices that the job may use."""
        if self.part is None:
            return left_for(view, self.others)
        return part_of(usable_nodes(question, view), self.part, view)


def may_not_delay(share: Share | None, its: Share | None) -> bool:
    """Return True if a job with this ``share`` must not delay a waiting job with the share ``its`` before it in line.

    If the job has a part, it may delay the jobs that got none in the same assignment: that gave the devices to others.
    It may not delay a job that is overdue anyway, which may need more devices than become free at once.
    """
    return share is None or share.part is None or its is None or its.part is not None or its.overdue


@dataclass(frozen=True)
class Running:
    """A running job that takes part in assignments.

    ``question``: the job, reduced to what its plan depends on. ``movable``: False while it rests, such as after a move.
    The other jobs then get parts beside the one that it will have, and not what it leaves today. ``rests_until``: time
    until which it rests because it has moved; None: it does not, or it does not move for another reason.
    """

    uid: str
    question: ParsedJob
    movable: bool
    rests_until: datetime | None = None


@dataclass(frozen=True)
class Order:
    """An order that a running job moves to its part (the devices assigned to it).

    ``room``: the jobs that need the devices that it gives up; None: no job does, so it moves only if it gains itself.
    ``since_s``: time of the order.
    """

    uid: str
    room: RoomFor | None
    since_s: float
