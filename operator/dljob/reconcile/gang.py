"""All or nothing: a job holds devices only while all its pods can run. Otherwise it releases them for a time.

The condition Admitted stores the state. True: the operator creates the pods of a plan.

- Starting: not all pods of the plan have run yet.
- Started: all pods ran.

False: the job has no pods, or its pods are stopping.

- NoPlan: no plan is possible now; the condition Planned says why. This may also happen after the pods have stopped for
  a better plan, if other jobs have taken the devices meanwhile.
- StartTimedOut: pods were missing or could not start for longer than ``spec.scheduling.startTimeout``, and nothing was
  trained. All pods are stopped, so that other jobs can use their nodes. After a back-off, which doubles each time, the
  job is planned again for the devices that are free then.
- RejectedByNodes: the kubelets of nodes have rejected a pod several times, and nothing was trained. All pods are
  stopped as after a start time-out. The new plan counts the pods of other schedulers that have taken the room.
- WaitingForNodes, NodesNotProvided: the plan needs new nodes, and an autoscaler may still add them, or does not add
  them (``admission.provisioning``).
- Suspended: the spec suspends the job. When the job resumes, it is planned again for the devices that are free then.
- PlanOnly: the job had pods or waited for devices, and its mode is now PlanOnly.
"""

import hashlib
from collections import Counter
from dataclasses import replace
from datetime import datetime

from dljob.api import PlanningMode
from dljob.api.base import duration_s
from dljob.api.spec.spec import DLJobSpec
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.job.waiting import BACK_OFFS, WAITS_FOR_NODES
from dljob.planner import Infeasible
from dljob.reconcile.desired import Draft
from dljob.reconcile.failures.fence import stop
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.rollout import quiet
from dljob.reconcile.run import running
from dljob.status import FALSE, TRUE, Verdict, changed_at, find, is_true, pods_ready

CONDITION = "Admitted"
START_TIMEOUT_S = 300.0
FIRST_BACK_OFF_S, MOST_BACK_OFF_S = 30.0, 900.0
LEAST_BACK_OFF_S = 1.0
"""Shortest first back-off. A spec may set a start time-out of 0 s, and twice 0 s would be no longer."""
MAX_REJECTIONS = 3
"""Number of times that nodes may reject one pod of a plan. Then all pods stop, and the job is planned again.

The StatefulSet controller replaces a rejected pod at once. If the scheduler that places the pod does not know what
takes the room, this could go on without end.
"""
_IN_PROGRESS = {"Starting", "FetchingDataset", "DatasetNotFetched", "FetchingSource", "SourceNotFetched"}
"""Reasons of PodsReady=False that are no obstacle: the pods have nodes, and pull images or fetch data."""


def waits(parsed: ParsedJob) -> bool:
    """Return True if the job has a plan but no pods, because it is not admitted.

    Its pods were stopped, for example after a start time-out, or never started. It must be planned again before pods
    start, because other jobs may use the devices of its plan now. Suspended jobs and PlanOnly jobs do not wait.
    """
    spec, found = parsed.spec, find(parsed.before.conditions, CONDITION)
    if (
        spec is None
        or spec.suspend
        or spec.planning.mode is PlanningMode.PLAN_ONLY
        or parsed.finished
        or parsed.accepted is None
        or not quiet(parsed.observed)
    ):
        return False
    if found is None:  # An older release wrote the status.
        return is_true(parsed.before.conditions, "Suspended")
    return found.status is FALSE and found.reason != WAITS_FOR_NODES


def awaits_nodes(parsed: ParsedJob) -> bool:
    """Return True if the job waits without pods until an autoscaler has added the nodes of its plan."""
    found = find(parsed.before.conditions, CONDITION)
    if found is None or found.status is not FALSE or found.reason != WAITS_FOR_NODES or parsed.queued:
        return False
    current = parsed.accepted is not None and parsed.accepted.spec_digest == parsed.digest
    return current and quiet(parsed.observed)


def stops(parsed: ParsedJob) -> bool:
    """Return True if the job must have no pods: in mode PlanOnly, or while they stop after a time-out or rejections.

    After these, no pod may start again before all have stopped.
    """
    if parsed.spec is not None and parsed.spec.planning.mode is PlanningMode.PLAN_ONLY:
        return True
    found = find(parsed.before.conditions, CONDITION)
    timed_out = found is not None and found.status is FALSE and found.reason in BACK_OFFS
    current = parsed.accepted is not None and parsed.accepted.spec_digest == parsed.digest
    return timed_out and current and not quiet(parsed.observed)


def back_off_left_s(parsed: ParsedJob, now: datetime) -> float:
    """Return the seconds until a job that was stopped for one of ``BACK_OFFS`` may be planned again; 0 or less: now.

    Return 0 for a job that was not stopped for such a reason.
    """
    found = find(parsed.before.conditions, CONDITION)
    if found is None or found.reason not in BACK_OFFS or parsed.spec is None:
        return 0.0
    waited_s = (now - changed_at(found, now)).total_seconds()
    timeout_s = start_timeout_s(parsed.spec, parsed.accepted)
    return back_off_s(parsed.before.start_timeouts, timeout_s, parsed.observed.job.uid) - waited_s


def start_timeout_s(spec: DLJobSpec, plan: StoredPlan | None) -> float:
    """Return the start time-out of a job in seconds: the time after which all its pods stop if some cannot start.

    This is the value of the spec. If the spec has none, it is ``START_TIMEOUT_S``, or the longer time-out of a ``plan``
    that needs nodes that do not exist yet.
    """
    if (text := spec.scheduling.start_timeout) is not None:
        return duration_s(text)
    return plan.start_timeout_s if plan is not None and plan.start_timeout_s is not None else START_TIMEOUT_S


def back_off_s(timeouts: int, timeout_s: float, uid: str) -> float:
    """Return the seconds from a start time-out, after which all pods of a job stop, until the job is planned again.

    ``timeouts``: how often the job has timed out in a row, this time included. The first back-off is
    ``FIRST_BACK_OFF_S`` or the time-out ``timeout_s``, whichever is shorter, but at least ``LEAST_BACK_OFF_S``. Each
    further one is twice as long, up to ``MOST_BACK_OFF_S``. ``uid``: uid of the job. It changes the back-off by up to
    25 %, so that two jobs whose pods stop at the same time do not block each other again.
    """
    first_s = max(LEAST_BACK_OFF_S, min(FIRST_BACK_OFF_S, timeout_s))
    spread = int(hashlib.sha256(uid.encode()).hexdigest()[:4], 16) / 0xFFFF  # 0 to 1, the same at every reconcile
    return min(first_s * 2.0 ** min(timeouts - 1, 16), MOST_BACK_OFF_S) * (0.75 + spread / 2)


def with_rejections_of_attempt(parsed: ParsedJob) -> ParsedJob:
    """Return the job with only those rejections of pods by nodes that are younger than the job's admission."""
    observed, admitted = parsed.observed, find(parsed.before.conditions, CONDITION)
    if not observed.rejections:
        return parsed
    since = admitted.last_transition_time if admitted is not None and admitted.status is TRUE else None
    kept = tuple(each for each in observed.rejections if since is not None and each.created >= since)
    return replace(parsed, observed=replace(observed, rejections=kept))


def with_timeouts_of_spec(parsed: ParsedJob) -> ParsedJob:
    """Return the job without its earlier start time-outs if they say nothing about its next start.

    That is so while the spec suspends the job, and when the spec has changed since the plan, because the user may have
    corrected the cause.
    """
    spec, accepted = parsed.spec, parsed.accepted
    if spec is None or parsed.finished or not parsed.before.start_timeouts:
        return parsed
    if not spec.suspend and (accepted is None or accepted.spec_digest == parsed.digest):
        return parsed
    return replace(parsed, before=parsed.before.model_copy(update={"start_timeouts": 0}))


def _rejected_too_often(parsed: ParsedJob, target: StoredPlan) -> bool:
    """Return True if nodes have rejected a pod of the plan too often, and the job does not train without the pod."""
    pods = Counter(each.pod for each in parsed.observed.rejections)
    return max(pods.values(), default=0) >= MAX_REJECTIONS and running(parsed, target).status is not TRUE


def admit(parsed: ParsedJob, draft: Draft, now: datetime) -> bool:
    """Return True if the job may keep its pods; False if all must stop, because some could not start in time.

    The draft already starts or keeps the pods. They must stop if some of them have been blocked for the start time-out.
    If they may stay, add the condition Admitted to the draft. If a pod is blocked, but the time-out is not over yet,
    also requeue the job for the end of the time-out.
    """
    observed, target = parsed.observed, draft.plan
    assert parsed.spec is not None and target is not None
    ready = pods_ready(observed, draft.wanted, now)
    if ready.status is TRUE:
        draft.start_timeouts = 0
        draft.verdicts.append(Verdict(CONDITION, TRUE, "Started", f"all {draft.wanted} pods of the plan run"))
        return True
    left_s = _blocked_left_s(parsed, target, ready, now)
    if left_s is not None and (left_s <= 0 or _rejected_too_often(parsed, target)):
        return False
    if left_s is not None:
        draft.requeue_in(left_s)
    text = f"the pods of the plan are created; {ready.message}"
    draft.verdicts.append(Verdict(CONDITION, TRUE, "Started" if started(parsed) else "Starting", text))
    return True


def started(parsed: ParsedJob) -> bool:
    """Return True if all pods of the plan in force have run at the same time."""
    before = find(parsed.before.conditions, CONDITION)
    return before is not None and before.status is TRUE and before.reason == "Started"


def _blocked_left_s(parsed: ParsedJob, target: StoredPlan, ready: Verdict, now: datetime) -> float | None:
    """Return the seconds until all pods of the job must stop, because some are blocked; 0 or less: now.

    ``ready``: the present condition PodsReady. Return None if no pod is blocked, if the job trains without the blocked
    pods, or if pods are on a lost node.
    """
    assert parsed.spec is not None
    admitted, was_ready = (find(parsed.before.conditions, kind) for kind in (CONDITION, "PodsReady"))
    if admitted is None or admitted.status is not TRUE or was_ready is None or was_ready.status is not FALSE:
        return start_timeout_s(parsed.spec, target) if ready.reason not in _IN_PROGRESS else None
    if any(pod.node in parsed.observed.lost_nodes for pod in parsed.observed.pods):
        return None  # The module ``fence`` removes them first, so that no rank on a lost node goes on by itself.
    if ready.reason in _IN_PROGRESS or running(parsed, target).status is TRUE:
        return None
    since = max(admitted.last_transition_time, was_ready.last_transition_time, stopped_training(parsed, now))
    since = min(since, now)  # A clock may have been ahead, see ``changed_at``.
    return start_timeout_s(parsed.spec, target) - (now - since).total_seconds()


def stopped_training(parsed: ParsedJob, now: datetime) -> datetime:
    """Return the time since which the job has not trained. It is ``now`` if the status shows that it still trains.

    A job may have trained for hours without a lost pod. If its ranks then restart, which takes seconds, the start
    time-out counts from the end of this training. For a job that has never trained, return the time of its creation.
    """
    found = find(parsed.before.conditions, "Running")
    if found is None:
        return parsed.observed.job.created
    return now if found.status is TRUE else found.last_transition_time


def release(parsed: ParsedJob, draft: Draft, now: datetime) -> None:
    """Change the draft so that all pods stop and none start, because the start time-out is over or nodes reject pods.

    Other jobs can then use the devices. Requeue the job for the time when it is planned again, after the back-off.
    """
    assert parsed.spec is not None
    timeout_s, ready = start_timeout_s(parsed.spec, draft.plan), pods_ready(parsed.observed, draft.wanted, now)
    text = (
        f"not all pods ran within the start time-out of {timeout_s:g} s (spec.scheduling.startTimeout): {ready.message}"
    )
    cause = Verdict(CONDITION, FALSE, "StartTimedOut", text)
    if draft.plan is not None and _rejected_too_often(parsed, draft.plan):
        text = f"nodes rejected a pod {MAX_REJECTIONS} times: {ready.message}"
        cause = Verdict(CONDITION, FALSE, "RejectedByNodes", text)
    back_off(parsed, draft, cause, now)


def back_off(parsed: ParsedJob, draft: Draft, cause: Verdict, now: datetime) -> None:
    """Change the draft so that all pods stop and none start, and the job is planned again after a back-off.

    ``cause``: the condition Admitted, without what happens next. Its reason is one of ``BACK_OFFS``.
    """
    assert parsed.spec is not None
    timeout_s = start_timeout_s(parsed.spec, draft.plan or parsed.accepted)
    draft.clear()
    stop(parsed, draft, now)
    draft.start_timeouts = parsed.before.start_timeouts + 1
    again_s = back_off_s(draft.start_timeouts, timeout_s, parsed.observed.job.uid)
    draft.requeue_in(again_s)
    text = (
        f"{cause.message}. The operator stops all pods, so that other jobs can use their nodes. The job is planned "
        f"again in {again_s:.0f} s"
    )
    draft.verdicts.append(replace(cause, message=text))
    draft.verdicts.append(
        Verdict("Running", FALSE, "NotStarted", "the job waits for its next start; see the condition Admitted")
    )


def plan_only(parsed: ParsedJob, draft: Draft) -> None:
    """Set Admitted to False for a job in mode PlanOnly, whose plan is only shown, if it has this condition.

    The job has the condition if it had pods or waited for devices before its mode was changed.
    """
    if find(parsed.before.conditions, CONDITION) is not None:
        text = "spec.planning.mode is PlanOnly: the plan is shown, and no pods are created"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "PlanOnly", text))


def lost(parsed: ParsedJob, draft: Draft, decision: StoredPlan | Infeasible | None) -> bool:
    """Return True if a job stopped for another plan, and its devices are now in use, so that it must wait.

    The caller then adds why no plan is possible, see ``no_plan``. Here, only the condition Running is added.
    ``decision``: result of planning; None: not yet known. If the job started with its old plan, its pods would find no
    nodes.
    """
    if not quiet(parsed.observed) or not isinstance(decision, Infeasible) or not decision.transient:
        return False
    draft.verdicts.append(Verdict("Running", FALSE, "NotStarted", "the job waits; see the condition Admitted"))
    return True


def no_plan(observed: Observed, draft: Draft, forecast: str) -> None:
    """Add the verdict of a job that has no pods and for which no plan is possible now, with its place in the queue.

    ``forecast``: text about the predicted start, which the message shows after the place; it may be empty. Do nothing
    while the job still has pods.
    """
    if quiet(observed):
        text = "no plan is possible now; see the condition Planned"
        if observed.place is not None:
            place, waiting = observed.place
            others = f"number {place} of {waiting} in the queue" if waiting > 1 else "the only waiting job"
            text = f"no plan is possible now, and the job is {others}{forecast}; see the condition Planned"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "NoPlan", text))
