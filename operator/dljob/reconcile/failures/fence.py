"""Fencing of pods on lost nodes.

A StatefulSet does not replace a pod on a lost node, because it waits for a kubelet that no longer answers. After
``nodeLostSeconds`` the operator therefore raises the job's term, a number in the plan, and force-deletes the pods. If
an agent on such a node returns later, it has a lower term, and the other agents reject it. The operator applies the
plan with the new term before it deletes a pod. The operator also deletes such pods of a job that stops or is deleted.
Otherwise, the job would wait until the lost node returns.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from pydantic import ValidationError

from dljob.api.spec.pods import RunPolicy
from dljob.job.observed import Observed, PodSeen
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile.desired import Desired, Draft, Target
from dljob.reconcile.parsed import ParsedJob, parse_observed
from dljob.reconcile.rollout import bring_down
from dljob.render import plan_config_map


def stop(parsed: ParsedJob, draft: Draft, now: datetime, *, over: bool = False) -> None:
    """Add to the draft that all pods of the job stop, and that overdue pods are deleted.

    A pod is overdue if its node has been lost for ``nodeLostSeconds``. If there is such a pod, also store the job's
    plan with a higher term, the number by which agents reject an agent that returns from a lost node. The next plan of
    the job starts from this term. ``over``: True if the job has ended. It then needs no higher term.
    """
    bring_down(draft, parsed.observed)
    fence_without_spec(parsed, draft, now, over=over)


def fence_without_spec(parsed: ParsedJob, draft: Draft, now: datetime, *, over: bool = False) -> None:
    """Add to the draft the deletion of overdue pods, and the plan with its higher term, but no other objects.

    The pods may be of a job whose spec is not valid, for example because a later release has stricter rules, which the
    spec in the plan then breaks too. ``over``: as in ``stop``.
    """
    accepted = parsed.accepted
    if accepted is None:
        return
    fenced = fence(parsed, draft, accepted, now)
    if fenced is not accepted and not over:
        draft.objects.append(plan_config_map(parsed.observed.job, fenced))


def fence(parsed: ParsedJob, draft: Draft, accepted: StoredPlan, now: datetime) -> StoredPlan:
    """Add the deletion of overdue pods to the draft. Return the plan, with its term increased if any pod is overdue.

    A pod is overdue if its node has been lost for ``nodeLostSeconds``. Agents reject other agents with a lower term, so
    the agent of a deleted pod cannot take part again if its node returns. If pods on lost nodes are not overdue yet,
    requeue the job for the time when they will be.
    """
    if not _delete_overdue(parsed, parsed.observed.pods, draft, now):
        return accepted
    return accepted.with_term(accepted.plan.term + 1)


def fence_deleted(observed: Observed, now: datetime) -> Desired:
    """Return the deletion of the overdue pods of a job that is being deleted, such as with ``--cascade=foreground``.

    Otherwise, the job would not be gone before the kubelet of the lost node reports the end of its pod. Pods that
    Kubernetes does not delete, and those of a job that is gone already, are left alone.
    """
    if not observed.lost_nodes:
        return Desired()
    draft = Draft()
    _delete_overdue(parse_observed(observed), [pod for pod in observed.pods if pod.deleting], draft, now)
    return Desired(deletes=tuple(draft.deletes), requeue_after_s=min(draft.requeues_s, default=None))


def _delete_overdue(parsed: ParsedJob, pods: Iterable[PodSeen], draft: Draft, now: datetime) -> bool:
    """Add the deletion of those of the ``pods`` that are overdue to the draft. Return True if there is one.

    Requeue the job for the time when other pods on lost nodes will be overdue.
    """
    lost_s, nodes, found = _lost_s(parsed), parsed.observed.lost_nodes, False
    for pod in pods:
        if pod.node is None or pod.node not in nodes or pod.fenced:
            continue
        left_s = (nodes[pod.node] + timedelta(seconds=lost_s) - now).total_seconds()
        if left_s > 0:
            draft.requeue_in(left_s)
            continue
        draft.deletes.append(Target("Pod", pod.name, pod.uid, force=True))
        found = True
    return found


def _lost_s(parsed: ParsedJob) -> int:
    """Return ``nodeLostSeconds`` of a job, also if other fields of its spec are invalid. If it is, use the default."""
    if parsed.spec is not None:
        return parsed.spec.run_policy.node_lost_seconds
    stated = parsed.observed.job.spec.get("runPolicy")
    if not isinstance(stated, Mapping) or "nodeLostSeconds" not in stated:
        return RunPolicy().node_lost_seconds
    try:
        return RunPolicy.model_validate({"nodeLostSeconds": stated["nodeLostSeconds"]}).node_lost_seconds
    except ValidationError:
        return RunPolicy().node_lost_seconds
