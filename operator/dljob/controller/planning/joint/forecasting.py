"""The jobs of a joint assignment as a forecast sees them: what they hold, how long they rest, and what moves cost."""

from collections import Counter
from dataclasses import replace
from datetime import datetime

from dljob.api import DLJobStatus
from dljob.job.remaining import RESTART_S
from dljob.job.reservation import PlannedPods
from dljob.reconcile.planning.resize import CONDITION
from dljob.scheduling.assignment import Held, Option
from dljob.scheduling.forecasting.joint_simulation import Costs, JointJob
from dljob.scheduling.gain import MIN_BETWEEN_S
from dljob.scheduling.pace import MEASURED_P90
from dljob.status import find


def costs(start_s: float) -> Costs:
    """Return what starts and moves cost. ``start_s``: seconds from the start of pods to the first step."""
    return Costs(start_s, RESTART_S, MIN_BETWEEN_S)


def held_by(
    job: JointJob, held: Held, status: DLJobStatus, now: datetime, start_s: float, refused_s: float
) -> JointJob:
    """Return a running job with what it holds. ``refused_s``: seconds for which it rests because it refused an order.

    ``start_s``: seconds from the start of pods to the first step.
    """
    last, begun = find(status.conditions, CONDITION), status.progress is not None and status.progress.step > 0
    rest_s = MIN_BETWEEN_S - (now - last.last_transition_time).total_seconds() if last is not None else 0.0
    first_s = 0.0 if begun else start_s + job.first_part * held.left_s
    return replace(
        job,
        held=held,
        rest_s=max(0.0, rest_s, refused_s, first_s),
        starting_s=0.0 if begun else start_s,
        spread=min(job.spread, MEASURED_P90) if status.measured is not None else job.spread,
    )


def moved(job: JointJob, part: Option, start_s: float) -> JointJob:
    """Return a job that stops to move to its part as if it held the part already, and still had to start."""
    same = (each for each in job.options if (each.device, each.devices) == (part.device, part.devices))
    mine = next(same, None) or min(job.options, key=lambda each: each.seconds, default=part)
    held = Held({part.device: part.devices}, mine.seconds, uses=mine.needs)
    return replace(job, held=held, rest_s=MIN_BETWEEN_S, starting_s=start_s)


def planned_devices(pods: PlannedPods | None) -> dict[str, int]:
    """Return the number of devices of each type that a plan takes; empty if there is no plan."""
    devices = Counter[str]()
    for group in pods.groups if pods is not None else ():
        devices[group.device] += group.nodes * group.ranks_per_node
    return dict(devices)
