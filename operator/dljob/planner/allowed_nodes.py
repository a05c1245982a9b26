"""Find the nodes that a request may use, before any plan on them is considered."""

from dataclasses import replace

from dljob.cluster import ClusterView, catalogue
from dljob.planner.candidates.pools import Eligible, Pool, eligible
from dljob.planner.explanation.devices import mixed_devices, not_on_gpus, without_gpus
from dljob.planner.explanation.infeasible import no_such_device
from dljob.planner.explanation.storage import too_little_storage
from dljob.planner.explanation.volumes import too_few_for_volumes
from dljob.planner.types import Infeasible, Refusal, Request

MAX_TYPES = 64
"""Maximum number of device types that a search considers. Its time and its memory grow with the cube of this number,
to 0.2 GiB with 64 types. Clusters have more if an administrator gives each node a label of its own."""


def allowed_nodes(request: Request, view: ClusterView) -> Eligible | Infeasible:
    """Return the nodes that devices, volumes and storage allow, or the reason why no plan is possible on any."""
    if (wrong := not_on_gpus(request, view) or no_such_device(request, view)) is not None:
        return wrong
    if (wrong := too_few_for_volumes(request, view) or too_little_storage(request, view)) is not None:
        return wrong
    everything = eligible(request, view)
    if (wrong := mixed_devices(request, everything)) is not None:
        return wrong
    usable = without_gpus(request, everything)
    return usable if isinstance(usable, Infeasible) else _most_capable(request, usable)


def _most_capable(request: Request, nodes: Eligible) -> Eligible:
    """Return ``nodes`` with the most capable ``MAX_TYPES`` device types, and more if ``nodes.min`` needs them.

    If the user fixes groups of nodes, or if there are no more types, return ``nodes`` unchanged.
    """
    if request.fixed or len(nodes.pools) <= MAX_TYPES:
        return nodes
    kept, count = set[str](), 0
    for pool in sorted(nodes.pools, key=_capability, reverse=True):
        if len(kept) >= MAX_TYPES and count >= request.nodes_min:
            break
        kept.add(pool.device)
        count += pool.nodes
    rest = [pool for pool in nodes.pools if pool.device not in kept]
    if not rest:
        return nodes
    others = sum(pool.nodes for pool in rest)
    line = Refusal(
        f"{others} nodes of {len(rest)} other device types",
        f"not considered: found {len(nodes.pools)} device types; expected at most {MAX_TYPES}, or as many as "
        "spec.nodes.min needs. Give equal nodes the same label dljob.dev/device, or name device types in spec.devices",
    )
    pools = tuple(pool for pool in nodes.pools if pool.device in kept)
    return replace(nodes, pools=pools, refusals=(*nodes.refusals, line))


def _capability(pool: Pool) -> tuple[bool, float]:
    """Return a key that is larger for GPUs, and then for more operations per second of all free devices of a type."""
    if pool.is_gpu:
        return True, catalogue.gpu_or_assumed(pool.device).conv_FLOPs * sum(pool.free)
    return False, sum(pool.room_cpu)
