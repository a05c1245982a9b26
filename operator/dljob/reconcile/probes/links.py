"""Decide when the operator measures the network between two nodes, of one device type or two. No I/O and no clock.

A measurement has two pods. The server answers messages. When it runs, its address is known, and the client starts on
the other node. Both pods end together.
"""

from collections.abc import Collection, Mapping, Sequence

from dljob.cluster import ClusterView
from dljob.job.probes.links import Ends
from dljob.job.probes.targets import Target, link_target
from dljob.reconcile.probes.actions import (
    Action,
    Connect,
    Ending,
    ProbePod,
    Remove,
    Start,
    Starts,
    Store,
    Subject,
    ended,
)

SERVER, CLIENT = "server", "client"
AFTER_S = 60.0
"""Seconds after the start of a type's hardware probe before which its link is not measured.

The first plans wait for that probe. Their jobs start when it ends, and should find no other measurement."""


def continued(
    view: ClusterView, pods: Collection[ProbePod], unmeasured: Collection[Ends], busy: Collection[str], waiting: bool
) -> list[Action]:
    """Return how the measurements of links go on or end now. Arguments: as of ``decide``; ``pods``: those of links."""
    found: list[Action] = []
    for ends in sorted({pod.subject.ends for pod in pods}):
        found += _of_link(view, [pod for pod in pods if pod.subject.ends == ends], unmeasured, busy, waiting)
    return found


def _of_link(
    view: ClusterView, pods: Sequence[ProbePod], unmeasured: Collection[Ends], busy: Collection[str], waiting: bool
) -> list[Action]:
    device, other = pods[0].device, pods[0].other
    if pods[0].subject.ends not in unmeasured:
        return [Remove(pod, "the link needs no measurement now", Ending.NOT_NEEDED) for pod in pods]
    if any(pod.alone for pod in pods):
        return [Remove(pod, "the other pod of the link was deleted", Ending.NOT_NEEDED) for pod in pods]
    done = next((pod for pod in pods if pod.link == CLIENT and pod.phase == "Succeeded"), None)
    if done is not None:
        return [Store(done), *_others(pods, done)]
    for pod in pods:
        if (end := ended(pod, busy, waiting)) is not None:
            return [end, *(Remove(other, end.why, Ending.NOT_NEEDED) for other in pods if other is not pod)]
    server = next((pod for pod in pods if pod.link == SERVER), None)
    if server is None:
        return []
    if server.phase == "Succeeded":
        return [Remove(server, "no pod connected to it in time"), *_others(pods, server)]
    node = next((node for node in view.nodes if node.name == server.client_node), None)
    if node is None:
        return [Remove(server, f"node {server.client_node} is gone", Ending.GAVE_WAY), *_others(pods, server)]
    if len(pods) == 1 and server.phase == "Running" and server.address:
        return [Connect(server, Target(device, node.is_gpu, node.name, node.free_cpu, server.node, other))]
    return []


def _others(pods: Sequence[ProbePod], ended_one: ProbePod) -> list[Remove]:
    why = "the measurement of the link has ended"
    return [Remove(pod, why, Ending.NOT_NEEDED) for pod in pods if pod is not ended_one]


def begun(
    view: ClusterView,
    unmeasured: Collection[Ends],
    devices: Collection[str],
    starts: Mapping[Subject, Starts],
    occupied: Collection[str],
    room: int,
    tolerations: Sequence[Mapping[str, object]],
    *,
    gpus: bool,
) -> list[Start]:
    """Return the links to start with now, with room for both pods of each.

    ``devices``: types of which something is measured now. ``occupied``: nodes with pods of jobs or probes. ``room``:
    number of pods that may start. The others are those of ``decide``. Links within a type come first, because most
    plans use one type.
    """
    found: list[Start] = []
    occupied, devices = set(occupied), set(devices)
    for device, end in sorted(unmeasured, key=lambda ends: (ends[0] != ends[1], ends)):
        other = end if end != device else ""
        last = starts.get(Subject(device, link=True, other=other))
        if room < 2 or devices & {device, end} or (last is not None and not last.allow_another):
            continue
        if any((tried := starts.get(Subject(each))) is not None and tried.ago_s < AFTER_S for each in (device, end)):
            continue
        target = link_target(view, device, occupied, tolerations, other)
        if target is None or target.peer is None or (target.is_gpu and not gpus):
            continue
        found.append(Start(target, link=True))
        occupied |= {target.node, target.peer}
        devices |= {device, end}
        room -= 2
    return found
