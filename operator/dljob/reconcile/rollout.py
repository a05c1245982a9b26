"""Bring pods of a plan up and down: the objects to apply, scale and delete, in order.

Pods of two plans or templates never run at the same time. A change first stops all pods, and each writes a checkpoint.
Plans and templates are therefore written only while no pod runs.
"""

from dljob.api import DLJobSpec
from dljob.job.observed import Observed
from dljob.job.stored_plan import StoredPlan
from dljob.reconcile.desired import Draft, Scale, Target
from dljob.render import Names, RenderConfig, checkpoint_claim, stateful_sets, support


def bring_up(draft: Draft, observed: Observed, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig) -> None:
    """Apply all objects of the job with all replicas. Delete StatefulSets whose groups are not in the plan."""
    job = observed.job
    draft.objects.extend(support(job, spec, accepted, config))
    claim = checkpoint_claim(job, spec, accepted)
    if claim is not None and claim["metadata"]["name"] not in observed.claims:  # The spec of a claim is immutable.
        draft.objects.append(claim)
    draft.secret = Names.of(job).secret
    present = {item.name: item for item in observed.sets}
    for manifest in stateful_sets(job, spec, accepted, config):
        name, replicas = manifest["metadata"]["name"], manifest["spec"]["replicas"]
        found = present.pop(name, None)
        if found is None or found.replicas == 0 or found.spec_digest != accepted.revision:
            draft.objects.append(manifest)
        elif found.replicas != replicas:
            draft.scales.append(Scale(name, replicas))
    draft.deletes.extend(Target("StatefulSet", name) for name in present)
    draft.plan, draft.wanted = accepted, accepted.nodes


def bring_down(draft: Draft, observed: Observed) -> None:
    """Scale all StatefulSets to 0; everything else stays."""
    draft.scales.extend(Scale(item.name, 0) for item in observed.sets if item.replicas > 0)
    draft.wanted = 0


def in_force(observed: Observed, accepted: StoredPlan) -> bool:
    """Return True if all StatefulSets with replicas have the template of this plan."""
    return all(item.spec_digest == accepted.revision for item in observed.sets if item.replicas > 0)


def quiet(observed: Observed) -> bool:
    """Return True if no pod runs or can start."""
    return not observed.pods and all(item.replicas == 0 for item in observed.sets)
