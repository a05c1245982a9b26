"""Fencing of pods on lost nodes, whose StatefulSet would wait forever for a kubelet that does not answer.

After ``nodeLostSeconds`` the operator raises the job's term and force-deletes the pods. Agents that return later have a
lower term and are rejected. The plan with the new term is applied before any pod is deleted.
"""

from datetime import datetime, timedelta

from dljob.api import DLJobSpec
from dljob.job.stored_plan import StoredPlan
from dljob.reconcile.desired import Draft, Target
from dljob.reconcile.parsed import ParsedJob


def fence(parsed: ParsedJob, draft: Draft, spec: DLJobSpec, accepted: StoredPlan, now: datetime) -> StoredPlan:
    """Add the deletion of overdue pods to the draft. Return the plan, with a higher term if any pod is overdue."""
    lost_s, nodes = spec.run_policy.node_lost_seconds, parsed.observed.lost_nodes
    overdue = []
    for pod in parsed.observed.pods:
        if pod.node is None or pod.node not in nodes:
            continue
        left_s = (nodes[pod.node] + timedelta(seconds=lost_s) - now).total_seconds()
        if left_s <= 0:
            overdue.append(pod)
        else:
            draft.requeue_in(left_s)
    if not overdue:
        return accepted
    draft.deletes.extend(Target("Pod", pod.name, pod.uid, force=True) for pod in overdue)
    plan = accepted.plan.model_copy(update={"term": accepted.plan.term + 1})
    return accepted.model_copy(update={"plan": plan})
