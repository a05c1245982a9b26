"""Jobs whose checkpoint claim only one node can use: their next plans use one node, on which they can still grow.

Without this limit, the best plan would often use several nodes. The job could not move to it, and would stay with its
plan although a better one on one node is possible. If it had stopped, for example because it was preempted, it could
not start again.
"""

from dljob.api import DLJobSpec
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.render import Names


def one_node_claim(observed: Observed, spec: DLJobSpec | None, accepted: StoredPlan | None) -> str:
    """Return the name of the checkpoint claim that keeps a job on one node; empty if none does.

    That is a claim without ReadWriteMany, of a job that was planned on one node before. It contains, or will soon
    contain, the job's checkpoints. A spec that needs several nodes is not limited: VolumeReady then says what to do.
    """
    if spec is None or accepted is None or accepted.nodes > 1 or not spec.checkpoint.on_volume:
        return ""
    if spec.nodes.min > 1 or spec.nodes.max == 1 or spec.planning.groups or spec.parallelism.asynchronous:
        return ""
    claim = observed.claims.get(spec.checkpoint.volume.claim_name or Names.of(observed.job).claim)
    return "" if claim is None or not claim.access_modes or "ReadWriteMany" in claim.access_modes else claim.name


def limited(spec: DLJobSpec) -> DLJobSpec:
    """Return the spec with at most one node."""
    return spec.model_copy(update={"nodes": spec.nodes.model_copy(update={"max": 1})})


def why(claim: str) -> str:
    """Return the text that says why a job stays on one node. ``claim``: as ``one_node_claim`` returns it."""
    return (
        f"it uses one node, because the claim {claim!r} with its checkpoints is not ReadWriteMany; a new job with "
        "checkpoint.volume.shared: true, or with checkpoint.uri, can use several"
    )
