"""Stored plans that somebody has edited: say so, and go on with the operator's own plan or with a new one."""

from collections.abc import Iterator

from dljob.job.observed import Observed
from dljob.job.plan.authentic import Edit
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.render import Names, plan_config_map
from dljob.status import FALSE, TRUE, Verdict, is_true

CONDITION = "PlanEdited"
_FOUND = {
    Edit.WRONG: "found a plan with a wrong signature",
    Edit.MISSING: "found a plan without a signature",
    Edit.OUTDATED: "found an earlier plan of this job",
}


def verdicts(parsed: ParsedJob) -> Iterator[Verdict]:
    """Yield the condition PlanEdited while the stored plan is not the operator's, and once afterwards."""
    edit, name = parsed.observed.plan_edit, Names.of(parsed.observed.job).plan
    if edit is not None:
        use = "stores its own plan again" if parsed.observed.plan is not None else "plans the job anew"
        text = (
            f"ConfigMap {name}: {_FOUND[Edit(edit)]}; expected the plan that the operator stored last. The operator "
            f"does not use it and {use}. Find who has changed it with 'kubectl get configmap {name} "
            "--show-managed-fields -o yaml', and let only the operator change it"
        )
        yield Verdict(CONDITION, TRUE, Edit(edit).value, text)
    elif is_true(parsed.before.conditions, CONDITION):
        yield Verdict(CONDITION, FALSE, "PlanRestored", f"ConfigMap {name} has the operator's plan again")


def store(parsed: ParsedJob, draft: Draft) -> None:
    """Store the operator's own plan again if somebody has edited it, or if its record of failures has new entries.

    Do nothing if the draft contains a plan already. Without the new record, a job that stops, waits or ends would count
    the same ends of pods in each reconcile.
    """
    job, accepted = parsed.observed.job, parsed.accepted
    if accepted is None or parsed.finished or (parsed.observed.plan_edit is None and not draft.counts_anew):
        return
    name = Names.of(job).plan
    if not any(item["kind"] == "ConfigMap" and item["metadata"]["name"] == name for item in draft.objects):
        draft.objects.append(plan_config_map(job, accepted))


def continued(parsed: ParsedJob, target: StoredPlan) -> StoredPlan | None:
    """Return the new plan ``target`` with the revision of the running pods if these can go on with it, or None.

    They can if somebody has edited the stored plan, but the ranks train in the same way with ``target`` as with the
    plan in the status (equal digests), in as many pods.
    """
    shown, observed = parsed.before.plan, parsed.observed
    if observed.plan_edit is None or parsed.accepted is not None or shown is None:
        return None
    if shown.digest != target.plan.digest() or (revision := _revision(observed)) is None:
        return None
    digest, _, replans = revision.rpartition("-")
    if digest == target.spec_digest and replans.isascii() and replans.isdecimal() and len(replans) < 7:
        target = target.model_copy(update={"replans": int(replans)})
    job = Names.of(observed.job)
    wanted = {job.set(group.name): group.nodes for group in target.groups}
    running = {item.name: item.replicas for item in observed.sets if item.replicas > 0}
    return target if target.revision == revision and wanted == running else None


def _revision(observed: Observed) -> str | None:
    """Return the revision of the plan that the pods run; None if no pods should run, or those of several plans."""
    found = {item.spec_digest for item in observed.sets if item.replicas > 0}
    return found.pop() if len(found) == 1 else None
