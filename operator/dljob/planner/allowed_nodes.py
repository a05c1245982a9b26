"""Find the nodes that a request may use, before any plan on them is considered."""

from dljob.cluster import ClusterView
from dljob.planner.candidates.pools import Eligible, eligible
from dljob.planner.explanation.devices import mixed_devices, not_on_gpus, without_gpus
from dljob.planner.explanation.infeasible import no_such_device
from dljob.planner.explanation.storage import too_little_storage
from dljob.planner.explanation.volumes import too_few_for_volumes
from dljob.planner.types import Infeasible, Request


def allowed_nodes(request: Request, view: ClusterView) -> Eligible | Infeasible:
    """Return the nodes that devices, volumes and storage allow, or the reason why no plan is possible on any."""
    if (wrong := not_on_gpus(request, view) or no_such_device(request, view)) is not None:
        return wrong
    if (wrong := too_few_for_volumes(request, view) or too_little_storage(request, view)) is not None:
        return wrong
    everything = eligible(request, view)
    if (wrong := mixed_devices(request, everything)) is not None:
        return wrong
    return without_gpus(request, everything)
