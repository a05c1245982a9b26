"""Decide when the operator measures the hardware of a device type. No I/O and no clock."""

from collections.abc import Collection, Mapping, Sequence

from dljob.calibrate.learned import Learned, hardware_of
from dljob.cluster import ClusterView
from dljob.job.probes.targets import probe_targets
from dljob.reconcile.probes.actions import Action, Ending, ProbePod, Remove, Start, Starts, Store, Subject, ended


def ends(
    pods: Collection[ProbePod], known: Mapping[tuple[str, str], Learned], busy: Collection[str], waiting: bool
) -> list[Action]:
    """Return how probe pods end now. Those that go on are not in the list. Arguments: as of ``decide``."""
    return [end for pod in pods if (end := _end(pod, known, busy, waiting)) is not None]


def begun(
    view: ClusterView,
    known: Mapping[tuple[str, str], Learned],
    devices: Collection[str],
    starts: Mapping[Subject, Starts],
    occupied: Collection[str],
    room: int,
    tolerations: Sequence[Mapping[str, object]],
    *,
    gpus: bool,
) -> list[Start]:
    """Return the types to start with now: at most ``room``, one on each machine.

    ``devices``: types that are measured already. ``occupied``: nodes with pods of jobs or probes. The others are those
    of ``decide``.
    """
    found: list[Start] = []
    measured, occupied = set(devices), set(occupied)
    for _ in range(room):
        targets, _why = probe_targets(view, known, busy=occupied, tolerations=tolerations, idle=True)
        wanted = [each for each in targets if each.device not in measured and (gpus or not each.is_gpu)]
        allowed = [each for each in wanted if (last := starts.get(Subject(each.device))) is None or last.allow_another]
        if not allowed:
            break
        found.append(Start(allowed[0]))
        measured.add(allowed[0].device)
        occupied.add(allowed[0].node)
    return found


def _end(
    pod: ProbePod, known: Mapping[tuple[str, str], Learned], busy: Collection[str], waiting: bool
) -> Action | None:
    if hardware_of(pod.device, known) is not None:
        return Remove(pod, "its type was measured meanwhile", Ending.NOT_NEEDED)
    return Store(pod) if pod.phase == "Succeeded" else ended(pod, busy, waiting)
