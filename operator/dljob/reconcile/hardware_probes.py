"""Decide when the operator measures the hardware of a device class, from what it sees now. No I/O and no clock."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dljob.calibrate.learned import Learned, hardware_of
from dljob.cluster import ClusterView
from dljob.cluster.machines import neighbours
from dljob.job.probes.targets import Target, probe_targets

MAX_STARTS = 3
"""Number of tries to measure a device class. After them, the operator tries it again only after its own restart. Tries
that give way to a job do not count."""
RETRY_S = 600.0
"""Seconds between two tries to measure the same device class."""
LIFE_S = 660.0
"""Age of a probe pod in seconds at which the operator deletes it. Kubernetes should have ended it after 600 s."""


@dataclass(frozen=True)
class ProbePod:
    """A pod of the operator that measures ``device`` on ``node``. ``message``: its termination message, if it ended."""

    name: str
    device: str
    node: str
    phase: str
    message: str
    age_s: float


@dataclass(frozen=True)
class Starts:
    """How often the operator has started to measure a device class, and how many seconds ago for the last time."""

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
) -> tuple[Action, ...]:
    """Return what to do now: at most one probe pod runs at a time, and each device class is measured once.

    ``known``: measured constants by (model key, device type), with those of measured hardware. ``pods``: the probe pods
    of the operator. ``starts``: tries by device class. ``busy``: nodes on which pods of jobs run; a probe on such a
    node, or on another node of its machine, would disturb the job, so its pod is deleted. ``waiting``: True if pods of
    jobs wait for a node. They may get any node, so no probe starts, and one that has not begun to run is deleted.
    ``tolerations``: those of probe pods.
    """
    busy = neighbours(view.nodes, busy)
    found: list[Action] = [_of_pod(pod, known, busy, waiting) for pod in pods if _is_over(pod, known, busy, waiting)]
    if pods or waiting:
        return tuple(found)
    targets, _ = probe_targets(view, known, busy=busy, tolerations=tolerations)
    for target in targets:
        before = starts.get(target.device)
        if before is None or (before.count < MAX_STARTS and before.ago_s >= RETRY_S):
            return (Start(target),)
    return ()


def _is_over(pod: ProbePod, known: Mapping[tuple[str, str], Learned], busy: Collection[str], waiting: bool) -> bool:
    if pod.phase in ("Succeeded", "Failed") or pod.age_s > LIFE_S or pod.node in busy:
        return True
    return (waiting and pod.phase == "Pending") or hardware_of(pod.device, known) is not None


def _of_pod(pod: ProbePod, known: Mapping[tuple[str, str], Learned], busy: Collection[str], waiting: bool) -> Action:
    if pod.phase == "Succeeded" and hardware_of(pod.device, known) is None:
        return Store(pod)
    if pod.phase == "Failed":
        return Remove(pod, f"it failed: {pod.message[:200] or 'without a message'}")
    if hardware_of(pod.device, known) is not None:
        return Remove(pod, "its class was measured meanwhile")
    if pod.node in busy:
        return Remove(pod, "a job began on its node or machine", for_job=True)
    if waiting and pod.phase == "Pending":
        return Remove(pod, "jobs wait for nodes", for_job=True)
    return Remove(pod, f"it is {pod.phase} after {pod.age_s:.0f} s")
