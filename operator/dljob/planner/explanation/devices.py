"""Which devices a job can use together, and with which collective: on GPUs, gradients are reduced with NCCL only.

The trainer's own collectives (message schedules over MPI, servers) cannot read GPU memory, so on GPUs it uses
torch.distributed with NCCL (RCCL on AMD's GPUs), whatever the plan names. A plan that names another collective would
have a wrong time, and one with a parameter server would leave a GPU idle. Asynchronous training is different: its
server and workers exchange messages through main memory, on GPUs too.
"""

from dataclasses import replace

from dljob.cluster import ClusterView
from dljob.cluster.catalogue import gpu
from dljob.planner.candidates.collectives import NCCL_NAMES
from dljob.planner.candidates.pools import Eligible, kind_of, wanted
from dljob.planner.types import Infeasible, Refusal, Request


def why_no_gpus(request: Request) -> tuple[str, str, str] | None:
    """Return why the job cannot use GPUs: (field of the spec, its value, remedy); None if it can use them."""
    if request.reduced_by_script or request.synchronization != "Synchronous":
        return None
    if request.compressed:
        return "spec.gradientCompression", "a 16-bit format", "remove gradientCompression"
    if request.collective is None or request.collective in NCCL_NAMES:
        return None
    return "spec.collective", request.collective, "set collective to Auto or Torch"


def not_on_gpus(request: Request, view: ClusterView) -> Infeasible | None:
    """Return ``Infeasible`` if the spec names GPUs and a way to reduce gradients that the trainer has on CPUs only.

    The spec names GPUs in ``devices`` or ``planning.groups``. Names that no node has count if the catalogue has them.
    """
    if (why := why_no_gpus(request)) is None:
        return None
    names = dict.fromkeys(each.device for each in request.fixed) if request.fixed else request.devices
    on_nodes = {node.device for node in view.nodes if node.is_gpu}
    gpus = [name for name in names if gpu(name) is not None or any(wanted(device, [name]) for device in on_nodes)]
    return _infeasible(why, f"the GPUs {', '.join(gpus)}") if gpus else None


def without_gpus(request: Request, nodes: Eligible) -> Eligible | Infeasible:
    """Return the nodes without those with GPUs if the job cannot use GPUs, with a reason for each type of GPU.

    Return ``Infeasible`` if no other nodes are left.
    """
    gpus = [pool for pool in nodes.pools if pool.is_gpu]
    if not gpus or (why := why_no_gpus(request)) is None:
        return nodes
    if len(gpus) == len(nodes.pools):
        return _infeasible(why, f"no other devices than {', '.join(pool.device for pool in gpus)}")
    field, value, remedy = why
    reason = f"{field} is {value}, but gradients are reduced with NCCL on GPUs: to use these GPUs, {remedy}"
    lines = tuple(Refusal(f"{pool.nodes} x {pool.device}", reason) for pool in gpus)
    rest = tuple(pool for pool in nodes.pools if not pool.is_gpu)
    return replace(nodes, pools=rest, refusals=(*nodes.refusals, *lines))


def _infeasible(why: tuple[str, str, str], gpus: str) -> Infeasible:
    field, value, remedy = why
    return Infeasible(
        "CollectiveNotOnGPUs",
        field,
        f"found {value} with {gpus}; expected a collective that runs there: gradients on GPUs are reduced with NCCL "
        f"only. {remedy[0].upper()}{remedy[1:]}, or use nodes without GPUs",
    )


def mixed_devices(request: Request, nodes: Eligible) -> Infeasible | None:
    """Return ``Infeasible`` if the groups that the user fixes combine GPUs with CPUs or GPUs of two vendors."""
    kinds: dict[str, list[str]] = {}
    for choice in request.fixed:
        pool = next((pool for pool in nodes.pools if wanted(pool.device, [choice.device])), None)
        kind = pool.kind if pool is not None else kind_of(choice.device, gpu(choice.device) is not None)
        kinds.setdefault(kind, []).append(choice.device)
    if len(kinds) < 2:
        return None
    found = " and ".join(f"{kind} ({', '.join(dict.fromkeys(names))})" for kind, names in kinds.items())
    return Infeasible(
        "MixedDevices",
        "spec.planning.groups",
        f"found {found} in one job; expected devices of one kind, because all ranks run the same build of PyTorch and "
        "reduce gradients with the same library: keep the groups of one kind",
    )
