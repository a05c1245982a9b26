"""Start the look pod of a job with ``spec.task``, follow it, and delete it once its result is known."""

from datetime import datetime

from dljob.api import DLJobSpec
from dljob.job.observed import DATASET_CONTAINER, DIGEST_ANNOTATION, Eviction, LookSeen
from dljob.reconcile.admission import priority_class
from dljob.reconcile.desired import Draft, Target
from dljob.reconcile.failures.storage_evictions import cause_of
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.spec.task import CONDITION, Looking
from dljob.render import Names, RenderConfig
from dljob.render.helpers.look import DEADLINE_S, MEMORY, look_objects, look_pod
from dljob.status import FALSE, TRUE, UNKNOWN, Verdict, is_true

REJECTED_RETRY_S = 10.0
"""Age in seconds of a look pod that the kubelet of its node has rejected, at which another pod takes its place."""
MAX_EVICTIONS = 3
"""Number of evicted look pods of a job in whose place another pod starts."""
_OF_NODE = frozenset({"NodeShutdown", "NodeLost", "Terminated", "Preempting"})
"""Reasons of failed pods that concern the node alone: the pod that follows may succeed."""


def look(parsed: ParsedJob, looking: Looking, draft: Draft, config: RenderConfig, now: datetime) -> None:
    """Add to the draft what a job without a suggestion needs: its look pod, and the condition DataInspected."""
    observed, job, names = parsed.observed, parsed.observed.job, Names.of(parsed.observed.job)
    pod = observed.look
    if looking.problem is not None:
        draft.verdicts.append(looking.problem)
        _delete(pod, draft)
        return
    if looking.spec.suspend:
        draft.verdicts.append(
            Verdict(CONDITION, UNKNOWN, "NotStarted", "spec.suspend is true: no pod looks at the data")
        )
        _delete(pod, draft)
        return
    if is_true(parsed.before.conditions, "Suspended"):
        draft.verdicts.append(Verdict("Suspended", FALSE, "NotSuspended", "spec.suspend is false"))
    if not config.look_image:
        text = (
            "spec.task: found a task, but the operator may not start the pod that looks at the data; expected the "
            "chart value tasks.enabled: true. Ask the administrator to set it, or run dljob suggest"
        )
        draft.verdicts.append(Verdict(CONDITION, FALSE, "NotAvailable", text))
        return
    if pod is None and observed.lacks_priority_class:  # also with PlanOnly, and while pods of an earlier spec run
        draft.requeue_in(priority_class.RECHECK_S)
        text = "the PriorityClass of the job does not exist, so that no pod looks; see the condition PriorityClassFound"
        draft.verdicts.append(Verdict(CONDITION, UNKNOWN, "NotStarted", text))
        return
    if pod is not None and (pod.node in observed.lost_nodes or (pod.phase == "Failed" and pod.reason in _OF_NODE)):
        why = pod.reason if pod.phase == "Failed" else "the node is lost"
        text = f"pod {pod.name} was lost with its node {pod.node} ({why}). Another pod starts and looks at the data"
        draft.verdicts.append(Verdict(CONDITION, UNKNOWN, "Looking", text))
        # It writes only its suggestion, so that two of them do no harm.
        draft.deletes.append(Target("Pod", pod.name, pod.uid, force=pod.node in observed.lost_nodes))
        return
    if pod is not None and (rejection := pod.rejection) is not None:
        text = f"node {rejection.node} rejected pod {pod.name} ({rejection.reason}: {rejection.message}). Another pod"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "LookDelayed", f"{text} starts, and looks at the data"))
        left_s = REJECTED_RETRY_S - (now - rejection.created).total_seconds()
        if left_s > 0:
            draft.requeue_in(left_s)
        else:
            _delete(pod, draft)
        return
    if pod is not None and (evicted := pod.eviction) is not None:
        verdict = _evicted(evicted, len(observed.look_evictions), looking.spec)
        draft.verdicts.append(verdict)
        if verdict.status is UNKNOWN:
            _delete(pod, draft)
        return
    wanted = look_pod(job, looking.spec, parsed.defaults, config)
    if pod is not None and (pod.deleting or pod.digest != wanted["metadata"]["annotations"][DIGEST_ANNOTATION]):
        text = f"pod {pod.name} is being deleted or is of an earlier spec, and ends before a new one starts"
        draft.verdicts.append(Verdict(CONDITION, UNKNOWN, "Looking", text))
        _delete(pod, draft)
        return
    draft.objects.extend(look_objects(job))
    if pod is None:
        draft.objects.append(wanted)
    if (rejected := observed.rejected) is not None:
        text = f"the API server rejected {rejected.kind} {rejected.name}: {rejected.message}"
        refused = Verdict(CONDITION, FALSE, "ObjectRejected", rejected.message if rejected.taken else text)
        waits = Verdict(CONDITION, UNKNOWN, "Looking", rejected.message)
        draft.verdicts.append(waits if rejected.being_deleted else refused)
        return
    draft.verdicts.append(_followed(pod, names, draft))


def _evicted(found: Eviction, times: int, spec: DLJobSpec) -> Verdict:
    """Return the verdict about an evicted look pod. Its status is UNKNOWN if another pod takes its place.

    The data of a pod that used more storage than it may would fill the next one, too. ``times``: number of look pods of
    the job that were evicted.
    """
    text = f"node {found.node} evicted pod {found.pod} ({found.message or 'no reason given'})"
    again = "and delete the pod to look again"
    if (cause := cause_of(found, spec)) is not None and cause.counts:
        remedy = "Set a larger spec.dataset.size if the data exceeded it, or make a smaller sample"
        return Verdict(
            CONDITION, FALSE, "LookFailed", f"{text}; expected a pod within its limits of storage. {remedy}, {again}"
        )
    if times > MAX_EVICTIONS:
        remedy = "Free resources of the nodes, or choose others with spec.scheduling.nodeSelector"
        text = f"{text}, the last of {times} evicted pods; expected at most {MAX_EVICTIONS}. {remedy}, {again}"
        return Verdict(CONDITION, FALSE, "LookFailed", text)
    return Verdict(CONDITION, UNKNOWN, "Looking", f"{text}. Another pod starts and looks at the data")


def _followed(pod: LookSeen | None, names: Names, draft: Draft) -> Verdict:
    if pod is None:
        return Verdict(CONDITION, UNKNOWN, "Looking", f"pod {names.look} starts, and looks at the data")
    if pod.phase == "Failed":
        text = (
            f"pod {pod.name} {_failed_to(pod)} within {DEADLINE_S} s ({pod.problem or 'no reason given'}); expected a "
            f"suggestion in the ConfigMap {names.suggestion}. See kubectl logs {pod.name} --all-containers, correct "
            "the cause, and delete the pod to look again"
        )
        return Verdict(CONDITION, FALSE, "LookFailed", text)
    if pod.phase == "Succeeded":
        text = (
            f"pod {pod.name} has ended, and the ConfigMap {names.suggestion} does not show its suggestion yet. If "
            "this message stays, delete the pod, and another one looks at the data"
        )
        return Verdict(CONDITION, UNKNOWN, "Looking", text)
    if pod.problem:
        remedy = ""
        if pod.problem.startswith("OOMKilled"):
            remedy = f". Set spec.resources.memory to more than before (default: {MEMORY}), or make a smaller sample"
        text = f"pod {pod.name} {_failed_to(pod)} so far: {pod.problem}{remedy}"
        return Verdict(CONDITION, FALSE, "LookDelayed", text)
    return Verdict(CONDITION, UNKNOWN, "Looking", f"pod {pod.name} looks at the data")


def _failed_to(pod: LookSeen) -> str:
    return "did not fetch the data" if pod.container == DATASET_CONTAINER else "did not look at the data"


def finish(parsed: ParsedJob, draft: Draft) -> None:
    """Add the condition of a job with a suggestion, and delete a look pod that is no longer needed."""
    if parsed.suggestion is not None:
        found = parsed.suggestion
        text = f"{found.model}, because {found.why}; see status.suggestion"
        draft.verdicts.append(Verdict(CONDITION, TRUE, "Suggested", text))
    if parsed.looking is None and parsed.observed.look is not None:
        _delete(parsed.observed.look, draft)


def _delete(pod: LookSeen | None, draft: Draft) -> None:
    if pod is not None and not pod.deleting:
        draft.deletes.append(Target("Pod", pod.name, pod.uid))
