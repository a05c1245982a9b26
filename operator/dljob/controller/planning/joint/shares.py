"""What an assignment of devices to all jobs together says about one job: its devices, and the order to move to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

from dljob.cluster import ClusterView
from dljob.controller.planning.answers import with_limits
from dljob.controller.planning.growing import usable_nodes
from dljob.controller.planning.joint.options import Charges
from dljob.kube import JobKey
from dljob.reconcile import ParsedJob
from dljob.scheduling.assignment import Option
from dljob.scheduling.assignment.reasons import RoomFor
from dljob.scheduling.parts import could_start, left_for, part_of

ToPlan = tuple[ParsedJob, ClusterView]
"""A job, with what it may use of the quotas of its namespace, and the nodes that it may use."""


@dataclass(frozen=True)
class Share:
    """The devices on which a job is planned, as a result of an assignment.

    ``part``: the devices that are assigned to the job. None: the job may use what the parts of ``others`` leave.
    ``overdue``: as in ``Candidate``. ``charges``: what the part charges to the quotas of the namespace; without a part,
    what those of ``others`` in the same namespace charge.
    """

    part: Option | None
    others: tuple[Option, ...] = ()
    overdue: bool = False
    charges: Charges = ()

    def of(self, view: ClusterView, question: ParsedJob) -> ToPlan:
        """Return the job to plan, and ``view`` with only the nodes and free devices that it may use."""
        if self.part is None:
            return _beside(question, self.charges), left_for(view, self.others)
        return question, part_of(usable_nodes(question, view), self.part, view)


Others = Sequence[tuple[JobKey, Share]]
"""The shares of other jobs that wait, each with a part."""


def shares(
    parts: Sequence[tuple[JobKey, Option | None]], waiting: dict[JobKey, Charges], overdue: Sequence[bool]
) -> dict[JobKey, Share]:
    """Return the shares of the jobs of an assignment. A running job without a part has none.

    ``parts``: the part of each job. ``waiting``: the jobs that wait, with what their parts charge. ``overdue``: as in
    ``Candidate``, for each job.
    """
    given = tuple(part for key, part in parts if part is not None and key in waiting)
    found = {}
    for (key, part), late in zip(parts, overdue, strict=True):
        if part is not None:
            found[key] = Share(part, (), late, waiting.get(key, ()))
        elif key in waiting:
            charges = chain.from_iterable(each for other, each in waiting.items() if other[0] == key[0])
            found[key] = Share(None, given, late, tuple(charges))
    return found


def left_by(question: ParsedJob, view: ClusterView, others: Others, *, starting: bool) -> ToPlan:
    """Return a job to plan and the nodes of ``view``, without what the parts of other jobs take.

    Only those that could have their devices now, one after another, take quota. ``starting``: True: only these take
    devices; False: all do.
    """
    able = [others[i] for i in could_start(view, [share.part for _, share in others])]
    mine = (share.charges for key, share in able if key[0] == question.observed.job.namespace)
    taken = [share.part for _, share in (able if starting else others)]
    return _beside(question, tuple(chain.from_iterable(mine))), left_for(view, taken)


def _beside(question: ParsedJob, charges: Charges) -> ParsedJob:
    """Return a job to plan with what other objects leave of its quotas. ``charges``: what these charge."""
    return with_limits(question, question.observed.limits.kept_for(charges, ())) if charges else question


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

    ``room``: the jobs that need what it gives up; None: no job does, so it moves only if it gains itself.
    ``since_s``: time of the order.
    """

    uid: str
    room: RoomFor | None
    since_s: float
