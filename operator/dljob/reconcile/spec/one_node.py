"""Jobs with a claim that only one node can use: their next plans use one node, on which they can still grow.

Without this limit, the best plan would often use several nodes. The job could not move to it, and would stay with its
plan although a better one on one node is possible. If it had stopped, for example because it was preempted, it could
not start again.
"""

from typing import NamedTuple

from dljob.api import DLJobSpec
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.render import Names


class OneNodeClaim(NamedTuple):
    """A claim that keeps a job on one node, and the field of the spec because of which the job uses it."""

    name: str
    field: str


def one_node_claim(observed: Observed, spec: DLJobSpec | None, accepted: StoredPlan | None) -> OneNodeClaim | None:
    """Return the claim that keeps a job on one node; None if none does.

    That is a claim that pods on several nodes cannot use, of a job that was planned on one node before: the claim with
    its checkpoints, its data, or the files of its script. A spec that needs several nodes is not limited: VolumeReady
    then says what to do.
    """
    if spec is None or accepted is None or accepted.nodes > 1:
        return None
    if spec.nodes.min > 1 or spec.nodes.max == 1 or spec.planning.groups or spec.parallelism.asynchronous:
        return None
    for used, writes in _claims(observed, spec):
        claim = observed.claims.get(used.name)
        shared = {"ReadWriteMany"} if writes else {"ReadWriteMany", "ReadOnlyMany"}
        if claim is not None and claim.access_modes and shared.isdisjoint(claim.access_modes):
            return used
    return None


def _claims(observed: Observed, spec: DLJobSpec) -> list[tuple[OneNodeClaim, bool]]:
    """Return each claim that the pods of the job use, and True if they write to it."""
    found: list[tuple[OneNodeClaim, bool]] = []
    if spec.checkpoint.on_volume:
        name = spec.checkpoint.volume.claim_name or Names.of(observed.job).claim
        found.append((OneNodeClaim(name, "spec.checkpoint.volume"), True))
    if (data := spec.dataset.claim) is not None:
        field = "spec.dataset.cacheClaimName" if spec.dataset.remote else "spec.dataset.uri"
        found.append((OneNodeClaim(data, field), spec.dataset.remote))
    archive = spec.trainer.source.archive if spec.trainer.source is not None else None
    if archive is not None and archive.claim is not None:
        found.append((OneNodeClaim(archive.claim, "spec.trainer.source.archive.uri"), False))
    return found


def limited(spec: DLJobSpec) -> DLJobSpec:
    """Return the spec with at most one node."""
    return spec.model_copy(update={"nodes": spec.nodes.model_copy(update={"max": 1})})


def why(claim: OneNodeClaim) -> str:
    """Return the text that says why a job stays on one node."""
    if claim.field == "spec.checkpoint.volume":
        return (
            f"it uses one node, because the claim {claim.name!r} with its checkpoints is not ReadWriteMany; a new job "
            "with checkpoint.volume.shared: true, or with checkpoint.uri, can use several"
        )
    return (
        f"it uses one node, because several nodes cannot use the claim {claim.name!r} of {claim.field}; with a claim "
        "that is ReadWriteMany it can use several"
    )
