"""What checkpoints and interruptions of nodes (spot nodes) cost, by the model of ``perf/step/interruptions.py``."""

from dataclasses import replace

from dljob.perf.step.interruptions import RESTART_S, CHECKPOINT_BANDWIDTH_Bps, Interruptions, STORE_BANDWIDTH_Bps
from dljob.perf.workload.workload import Workload
from dljob.planner.types import Prediction, Request

SHORTEST_CHECKPOINT_S = 0.1
"""Assumed minimum of the seconds that a checkpoint takes, however small it is."""


def checkpoint_s(workload: Workload, *, in_store: bool = False) -> float:
    """Return the predicted seconds to write a checkpoint, which has the parameters and the optimizer's state.

    ``in_store``: True if the checkpoints are in an object store, and not on a volume. If several ranks write a part
    each, the parts share the bandwidth of the volume or the store.
    """
    nbytes = workload.gradient_nbytes * (1 + workload.optimizer_slots)
    return max(SHORTEST_CHECKPOINT_S, nbytes / (STORE_BANDWIDTH_Bps if in_store else CHECKPOINT_BANDWIDTH_Bps))


def interruptions_of(request: Request, workload: Workload, writers: int = 1, refetch_s: float = 0.0) -> Interruptions:
    """Return the model of a job's interruptions in the request's domain (part of the cluster), such as spot nodes.

    It has the interruptions per hour of one node, and the cost and interval of the job's checkpoints. A checkpoint
    costs the training time in which a rank copies, hashes and writes its part. ``writers``: number of ranks that each
    write a part of the state. ``refetch_s``: seconds in which a new node fetches the job's data.
    """
    write_s = checkpoint_s(workload, in_store=request.checkpoints_in_store)
    return Interruptions(
        request.domain.interruptions_per_h,
        max(SHORTEST_CHECKPOINT_S, write_s / writers),
        request.checkpoint_interval_s,
        request.checkpoints,
        RESTART_S + refetch_s,
    )


def interrupted(
    found: Prediction, request: Request, workload: Workload, nodes: int, writers: int = 1, refetch_s: float = 0.0
) -> Prediction:
    """Add what checkpoints and interruptions cost to ``found``, the prediction of a plan without them.

    Scripts that reduce gradients themselves (torchrun, MPI) also write their checkpoints themselves, nobody knows how
    often. They are assumed to do so as the trainer does only if the nodes of the request's domain are interrupted.

    ``nodes``: number of nodes in the plan. ``writers``: number of its ranks that each write a part of a checkpoint.
    ``refetch_s``: seconds in which a new node fetches the job's data.
    """
    model = interruptions_of(request, workload, writers, refetch_s)
    written = 0.0 if request.reduced_by_script else model.written(found.total_s, nodes)
    longer = 1 + written * model.checkpoint_s / found.total_s
    written_s = found.total_s * longer
    total_s = max(written_s, float(model.expected_s(found.total_s, nodes)))
    longest_s = max(found.total_p90_s * longer, float(model.expected_s(found.total_p90_s, nodes)))
    longer = total_s / found.total_s
    return replace(
        found,
        total_s=total_s,
        total_p90_s=longest_s + model.p90_s(found.total_p90_s, nodes),
        energy_J=None if found.energy_J is None else found.energy_J * longer,
        cost_usd=None if found.cost_usd is None else found.cost_usd * longer,
        carbon_g=None if found.energy_J is None else request.carbon_g(found.energy_J * longer, total_s),
        interruptions=model.expected(total_s, nodes),
        interruption_s=total_s - written_s,
        checkpoints_s=written_s - found.total_s,
    )
