"""Decide when the operator measures hardware, and the links between nodes, from what it sees now. No I/O, no clock."""

from collections.abc import Collection, Mapping, Sequence

from dljob.calibrate.learned import Learned
from dljob.cluster import ClusterView
from dljob.cluster.machines import neighbours
from dljob.job.probes.links import Ends
from dljob.reconcile.probes import hardware, links
from dljob.reconcile.probes.actions import (
    MAX_CROWDED,
    MAX_PODS,
    MAX_STARTS,
    RETRY_S,
    UNBOUND_S,
    Action,
    Connect,
    Ending,
    ProbePod,
    Remove,
    Start,
    Starts,
    Store,
    Subject,
)

__all__ = [
    "MAX_CROWDED",
    "MAX_PODS",
    "MAX_STARTS",
    "RETRY_S",
    "UNBOUND_S",
    "Action",
    "Connect",
    "Ending",
    "ProbePod",
    "Remove",
    "Start",
    "Starts",
    "Store",
    "Subject",
    "decide",
]


def decide(
    view: ClusterView,
    known: Mapping[tuple[str, str], Learned],
    pods: Collection[ProbePod],
    starts: Mapping[Subject, Starts],
    busy: Collection[str],
    waiting: bool,
    tolerations: Sequence[Mapping[str, object]] = (),
    *,
    gpus: bool = True,
    unmeasured_links: Collection[Ends] = (),
) -> tuple[Action, ...]:
    """Return what to do now, so that each device type and each link is measured once, on idle machines.

    Of each type one measurement runs at a time, and each machine has the pods of one; at most ``MAX_PODS`` pods exist.
    ``known``: measured constants by (model key, device type), with those of measured hardware. ``pods``: the probe
    pods of the operator. ``starts``: earlier tries. ``busy``: nodes on which pods of jobs run; a probe on such a node,
    or on another node of its machine, would disturb the job, so its pods are deleted. ``waiting``: True if pods of jobs
    wait for a node. They may get any node, so no probe starts, and those that run are deleted. ``tolerations``: those
    of probe pods. ``gpus``: False to measure no GPUs. ``unmeasured_links``: device types of both ends of the links
    between nodes that are to be measured.
    """
    busy = neighbours(view.nodes, busy)
    of_links, of_hardware = [pod for pod in pods if pod.link], [pod for pod in pods if not pod.link]
    found: list[Action] = hardware.ends(of_hardware, known, busy, waiting)
    found += links.continued(view, of_links, unmeasured_links, busy, waiting)
    if waiting:
        return tuple(found)
    occupied = busy | {pod.node for pod in pods} | {pod.client_node for pod in of_links if pod.client_node}
    reserved = max(len(pods), len(of_hardware) + 2 * len({pod.subject for pod in of_links}))
    begun = {device for pod in pods for device in pod.subject.ends}
    more = hardware.begun(view, known, begun, starts, occupied, MAX_PODS - reserved, tolerations, gpus=gpus)
    occupied |= {start.target.node for start in more}
    begun |= {start.target.device for start in more}
    room = MAX_PODS - reserved - len(more)
    pairs = links.begun(view, unmeasured_links, begun, starts, occupied, room, tolerations, gpus=gpus)
    return (*found, *more, *pairs)
