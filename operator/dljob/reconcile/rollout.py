"""From a plan to pods and back: what is applied, scaled and deleted, and in which order.

Pods of two plans or two templates never mix: a change goes through zero pods (each checkpoints on its way out).
So a plan or a template in force is only written while no pod runs.
"""

from dljob.api import DLJobSpec
from dljob.job.observed import Observed
from dljob.job.stored_plan import StoredPlan
from dljob.reconcile.desired import Draft, Scale, Target
from dljob.render import Names, RenderConfig, checkpoint_claim, stateful_sets, support


def bring_up(draft: Draft, observed: Observed, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig) -> None:
    """All of the job's objects, sets with their replicas; sets of groups that the plan no longer has are deleted."""
    job = observed.job
    draft.objects.extend(support(job, spec, accepted, config))
    claim = checkpoint_claim(job, spec, accepted)
    if claim is not None and claim["metadata"]["name"] not in observed.claims:  # a claim's spec does not change
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
    """No pods; everything else stays."""
    draft.scales.extend(Scale(item.name, 0) for item in observed.sets if item.replicas > 0)
    draft.wanted = 0


def in_force(observed: Observed, accepted: StoredPlan) -> bool:
    """Whether every set that has pods has them by this plan's spec."""
    return all(item.spec_digest == accepted.revision for item in observed.sets if item.replicas > 0)


def quiet(observed: Observed) -> bool:
    """Whether no pod runs or may start to."""
    return not observed.pods and all(item.replicas == 0 for item in observed.sets)
