"""Start and stop the pods of a plan: find the objects to apply, scale and delete.

Pods of two plans or templates never run at the same time. Before a change of the plan, all pods write a checkpoint and
stop. The operator writes the new plan and the new pod templates only after that.
"""

from collections.abc import Sequence

from dljob.api import Condition, DLJobSpec
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile.desired import Draft, Scale, Target
from dljob.render import Names, RenderConfig, checkpoint_claim, stateful_set, support
from dljob.status import FALSE, Verdict, is_true

_OF_FORMER_PLAN = {
    "PlanContradicted": ("Replanned", "plan {} replaces the plan that the measurements contradicted"),
    "NodeFaulty": ("Replanned", "plan {} replaces the plan that used nodes with repeated faults"),
    "Resizing": ("Resized", "the move ends, because the job gets plan {} for another reason"),
}
"""Conditions about the plan in force, by type: reason and message after another plan, with its number, replaced it."""


def bring_up(draft: Draft, observed: Observed, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig) -> None:
    """Add to the draft what is necessary so that all pods of the plan ``accepted`` run.

    These are the objects to apply, the StatefulSets that only need another number of replicas, and the deletion of
    StatefulSets whose groups are not in the plan. Also set ``draft.plan``, and the number of pods in ``draft.wanted``.
    """
    job = observed.job
    draft.objects.extend(support(job, spec, accepted, config))
    claim = checkpoint_claim(job, spec, accepted, observed.classes)
    if claim is not None and claim["metadata"]["name"] not in observed.claims:  # The spec of a claim is immutable.
        draft.objects.append(claim)
    draft.secret = Names.of(job).secret
    present = {item.name: item for item in observed.sets}
    for group in accepted.groups:
        name = Names.of(job).set(group.name)
        found = present.pop(name, None)
        if found is None or found.replicas == 0 or found.spec_digest != accepted.revision:
            draft.objects.append(stateful_set(job, spec, accepted, group, config))
        elif found.replicas != group.nodes:
            draft.scales.append(Scale(name, group.nodes, found.uid))
    draft.deletes.extend(Target("StatefulSet", item.name, item.uid) for item in present.values())
    draft.plan, draft.wanted = accepted, accepted.nodes


def bring_down(draft: Draft, observed: Observed) -> None:
    """Add to the draft that all StatefulSets are scaled to 0, so that all pods stop. Other objects do not change."""
    draft.scales.extend(Scale(item.name, 0, item.uid) for item in observed.sets if item.replicas > 0)
    draft.wanted = 0


def in_force(observed: Observed, accepted: StoredPlan) -> bool:
    """Return True if every StatefulSet with at least one replica has the pod template of the plan ``accepted``.

    Return True also if no StatefulSet has replicas. If the result is False, the pods of another plan must stop first.
    """
    return all(item.spec_digest == accepted.revision for item in observed.sets if item.replicas > 0)


def quiet(observed: Observed) -> bool:
    """Return True if the job has no pod, not even one that is stopping, and no pod can be created.

    The StatefulSet controller must have processed the scaling to 0. Otherwise it may still create a pod.
    """
    stopped = (item.replicas == 0 and item.made_replicas == 0 and item.reconciled for item in observed.sets)
    return not observed.pods and all(stopped)


def end_conditions_of_former_plan(before: Sequence[Condition], draft: Draft, new: StoredPlan) -> None:
    """Set conditions about the former plan from True to False if the job gets the plan ``new`` for another reason.

    The usual reason is a change of the spec, or the job has stopped to move and then waited. ``before``: the job's
    conditions before this reconcile.
    """
    for kind, (reason, text) in _OF_FORMER_PLAN.items():
        if is_true(before, kind):
            draft.verdicts.append(Verdict(kind, FALSE, reason, text.format(new.plan.number)))
