"""Pods on lost nodes: their StatefulSet waits for ever for a kubelet that does not answer.

After ``nodeLostSeconds`` the job's term is raised, so that agents which come back are refused, and the pods are
deleted by force. The term comes first: the plan is applied before anything is deleted.
"""

from datetime import datetime, timedelta

from dljob.api import DLJobSpec
from dljob.job.stored_plan import StoredPlan
from dljob.reconcile.desired import Draft, Target
from dljob.reconcile.parsed import ParsedJob


def fence(known: ParsedJob, draft: Draft, spec: DLJobSpec, accepted: StoredPlan, now: datetime) -> StoredPlan:
    """The plan, with a higher term where pods are fenced off; their deletion is in the draft."""
    lost_s, nodes = spec.run_policy.node_lost_seconds, known.observed.lost_nodes
    overdue = []
    for pod in known.observed.pods:
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
