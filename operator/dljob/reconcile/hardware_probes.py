"""Decide when the operator measures the hardware of a device type, from what it sees now. No I/O and no clock."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dljob.calibrate.learned import Learned, hardware_of
from dljob.cluster import ClusterView
from dljob.cluster.machines import neighbours
from dljob.job.probes.targets import Target, probe_targets

MAX_STARTS = 3
"""Number of tries to measure a device type. After them, the operator tries it again only after its own restart. Tries
that give way to a job do not count."""
RETRY_S = 600.0
"""Seconds between two tries to measure the same device type."""
LIFE_S = 660.0
"""Age of a probe pod in seconds at which the operator deletes it. Kubernetes should have ended it after 600 s."""
UNBOUND_S = 60.0
"""Age of a probe pod in seconds at which the operator deletes it if no scheduler has placed it on its node."""
MAX_PODS = 4
"""Maximum number of probe pods that exist at the same time. Each is on a machine of its own."""
MAX_CROWDED = 1.3
"""Largest (elapsed time / CPU time) of a probe's steps that the operator accepts. Above, other processes use the node.

``dltrain.hardware_probe`` measures several cores only below the same limit."""


@dataclass(frozen=True)
class ProbePod:
    """A pod of the operator that measures ``device`` on ``node``. ``message``: its termination message, if it ended.

    ``bound``: True if a scheduler has placed it.
    """

    name: str
    device: str
    node: str
    phase: str
    message: str
    age_s: float
    bound: bool = True


@dataclass(frozen=True)
class Starts:
    """How often the operator has started to measure a device type, and how many seconds ago for the last time."""

    count: int
    ago_s: float


@dataclass(frozen=True)
class Start:
    target: Target


@dataclass(frozen=True)
class Store:
    """Store what a pod has measured, and then delete the pod."""

    pod: ProbePod


@dataclass(frozen=True)
class Remove:
    """Delete a pod whose measurement is not stored, because it failed or is not needed.

    ``why``: for the log. ``for_job``: True if the measurement gives way to a job.
    """

    pod: ProbePod
    why: str
    for_job: bool = False


Action = Start | Store | Remove


def decide(
    view: ClusterView,
    known: Mapping[tuple[str, str], Learned],
    pods: Collection[ProbePod],
    starts: Mapping[str, Starts],
    busy: Collection[str],
    waiting: bool,
    tolerations: Sequence[Mapping[str, object]] = (),
    *,
    gpus: bool = True,
) -> tuple[Action, ...]:
    """Return what to do now, so that each device type is measured once, on idle machines.

    Of each type, and on each machine, one pod runs at a time; at most ``MAX_PODS`` in total. ``known``: measured
    constants by (model key, device type), with those of measured hardware. ``pods``: the probe pods of the operator.
    ``starts``: tries by device type. ``busy``: nodes on which pods of jobs run; a probe on such a node, or on another
    node of its machine, would disturb the job, so its pod is deleted. ``waiting``: True if pods of jobs wait for a
    node. They may get any node, so no probe starts, and those that run are deleted. ``tolerations``: those of probe
    pods. ``gpus``: False to measure no GPUs.
    """
    busy = neighbours(view.nodes, busy)
    found: list[Action] = [end for pod in pods if (end := _end(pod, known, busy, waiting)) is not None]
    if waiting:
        return tuple(found)
    measured, occupied = {pod.device for pod in pods}, busy | {pod.node for pod in pods}
    for _ in range(MAX_PODS - len(pods)):
        targets, _why = probe_targets(view, known, busy=occupied, tolerations=tolerations, idle=True)
        wanted = [each for each in targets if each.device not in measured and (gpus or not each.is_gpu)]
        target = next((each for each in wanted if _may_start(starts.get(each.device))), None)
        if target is None:
            break
        found.append(Start(target))
        measured.add(target.device)
        occupied = occupied | {target.node}
    return tuple(found)


def _may_start(before: Starts | None) -> bool:
    return before is None or (before.count < MAX_STARTS and before.ago_s >= RETRY_S)


def _end(
    pod: ProbePod, known: Mapping[tuple[str, str], Learned], busy: Collection[str], waiting: bool
) -> Action | None:
    """Return how a probe pod ends now; None if it goes on."""
    if hardware_of(pod.device, known) is not None:
        return Remove(pod, "its type was measured meanwhile")
    if pod.phase == "Succeeded":
        return Store(pod)
    if pod.phase == "Failed":
        return Remove(pod, f"it failed: {pod.message[:200] or 'without a message'}")
    if pod.node in busy:
        return Remove(pod, "a job began on its node or machine", for_job=True)
    if waiting:
        return Remove(pod, "jobs wait for nodes", for_job=True)
    if not pod.bound and pod.age_s > UNBOUND_S:
        return Remove(pod, f"no scheduler has placed it within {UNBOUND_S:.0f} s")
    if pod.age_s > LIFE_S:
        return Remove(pod, f"it is {pod.phase} after {pod.age_s:.0f} s")
    return None
