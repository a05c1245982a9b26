"""Compare a job with dltrain over MPI, as a script for torchrun with gloo, and with a parameter server.

Each framework gets its own best plan. The formulas are those of the planner, with the measured constants of the
framework's communication backend (``perf.step.backends``). All three compute the same model, so that computing times
are equal, and their errors too: what separates the frameworks is their communication.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dlcontract import SERVERS, CollectiveName
from dljob.calibrate.learned import Learned
from dljob.cluster import ClusterView
from dljob.perf.step.backends import Backend, backend
from dljob.planner.plan import plan
from dljob.planner.search import objective
from dljob.planner.types import Choice, Decision, Infeasible, Request

MPI_COLLECTIVES: tuple[CollectiveName, ...] = ("Ring", "HalvingDoubling", "Butterfly", "Tree")
"""Collectives of dltrain over MPI that have no server."""
DLTRAIN, TORCHRUN, SERVER = "dltrain over MPI", "Torchrun with gloo", "parameter server"

Constants = Mapping[tuple[str, str], Learned]


@dataclass(frozen=True)
class FrameworkPlan:
    """The best plan of a job with one framework, or the reason why there is none.

    ``reason``: why there is no plan; empty if there is one. ``backend``: the measured constants that predict its
    communication; None on GPUs, where data sheets predict that of NCCL.
    """

    name: str
    choice: Choice | None
    reason: str = ""
    backend: Backend | None = None


def compare(request: Request, view: ClusterView, learned: Constants, uneven: bool) -> list[FrameworkPlan]:
    """Return the best synchronous data-parallel plan with each framework, in a fixed order.

    ``uneven``: True if dltrain may give faster ranks larger local batches. Torchrun scripts divide batches evenly.
    ``learned``: measured constants by (model or training script, device). Return an empty list if the times of the job
    cannot be predicted (``request.missing``).

    On GPUs, dltrain and torchrun both use NCCL, and no constants of a parameter server were measured.
    """
    if request.missing:
        return []
    same = replace(
        request, strategy="Data", synchronization="Synchronous", compressed=False, collective=None, batches=None
    )
    first = plan(replace(same, uneven=uneven), view, learned)
    if isinstance(first, Infeasible):
        return [FrameworkPlan(name, None, f"{first.field}: {first.message}") for name in (DLTRAIN, TORCHRUN, SERVER)]
    is_gpu = any(group.is_gpu for group in first.chosen.groups)
    nodes = ClusterView(tuple(node for node in view.nodes if node.is_gpu == is_gpu))
    script = replace(same, uneven=False, collective="Torch")
    if is_gpu:
        name = "no constants of a parameter server were measured on GPUs, where dltrain and torchrun use NCCL"
        return [
            FrameworkPlan(DLTRAIN.replace("MPI", "NCCL"), first.chosen),
            _framework(TORCHRUN.replace("gloo", "NCCL"), script, nodes, learned),
            FrameworkPlan(SERVER, None, name),
        ]
    served = replace(same, uneven=uneven, collective="ParameterServer", backend=backend("ParameterServer"))
    return [
        _with_mpi(replace(same, uneven=uneven, backend=backend("MPI")), nodes, learned),
        _framework(TORCHRUN, replace(script, backend=backend("Gloo")), nodes, learned),
        _framework(SERVER, served, nodes, learned),
    ]


def _with_mpi(request: Request, view: ClusterView, learned: Constants) -> FrameworkPlan:
    """Return dltrain's best plan without a server.

    If the planner chooses the collective, it may choose one with a parameter server. If it does, plan with each of
    ``MPI_COLLECTIVES`` and return the best of these plans.
    """
    found = _framework(DLTRAIN, request, view, learned)
    if found.choice is None or found.choice.collective not in SERVERS:
        return found
    each = [_framework(DLTRAIN, replace(request, collective=name), view, learned) for name in MPI_COLLECTIVES]
    choices = [one.choice for one in each if one.choice is not None]
    return replace(each[0], choice=objective.best(request, choices)) if choices else each[0]


def _framework(name: str, request: Request, view: ClusterView, learned: Constants) -> FrameworkPlan:
    found = plan(request, view, learned)
    if isinstance(found, Decision):
        return FrameworkPlan(name, found.chosen, backend=request.backend)
    return FrameworkPlan(name, None, f"{found.field}: {found.message}", request.backend)
