"""Count ends of ranks and pods at the memory limit of their pod, and say what to do about them.

With cgroup v1, the kernel ends one rank, and the agent reports that. With cgroup v2, kubelets let it end the whole
container (``memory.oom.group``). No agent can report that, and for the coordinator the pod is just lost, which never
counts. The operator therefore counts such ends like failures of the training script. ``planning.more_memory`` gives the
pods more memory, unless the spec sets it.
"""

from dataclasses import replace
from datetime import datetime

from dlcontract import Report, RunPhase, reasons
from dljob.job.observed import SIGKILLED, PodSeen
from dljob.job.plan.failures import MAX_EVICTED, FailureRecord, computation_digest
from dljob.job.plan.stored import StoredPlan
from dljob.planner.types.texts import gibibytes
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.status import FALSE, TRUE, Event, Verdict, find
from dljob.status.events import MAX_MESSAGE

CONDITION = "MemoryExceeded"
RECENT_S = 600.0
"""Seconds for which the end of a pod can be counted. A job that has recovered from an earlier one must not restart when
this release of the operator sees it for the first time."""
TOGETHER_S = 30.0
"""Seconds within which the ends of several pods count as one: ranks of one step need the same memory."""


def counted(parsed: ParsedJob, draft: Draft, now: datetime) -> ParsedJob:
    """Return the job with new ends at the memory limit added to the record of failures in its stored plan.

    Also add an event for each new end, and the condition MemoryExceeded, to the draft. After a change of what ranks
    compute (``changes.computed_fields``), the count starts at 0 again, because the new spec may need less memory.
    """
    accepted = parsed.accepted
    if accepted is None or parsed.spec is None:
        return parsed
    record = known = accepted.failures or FailureRecord()
    for pod, key in _of_pods(parsed, now):
        counts = not _is_together(pod, record)
        if key in record.killed or not (counts or _has_room(record, pod.memory_killed_at)):
            continue
        record = record.model_copy(update={"killed": (*record.killed, key)[-MAX_EVICTED:]})
        text = f"pod {pod.name} ended, because it reached its memory limit"
        if counts:
            record = _with(record, accepted, text, pod.name)
            more = {"pod_kills": record.pod_kills + 1, "killed_at": pod.memory_killed_at[:64]}
            record = record.model_copy(update=more)
        given = _amount(parsed, _memory_of(accepted, pod.name))
        draft.events.append(Event("Warning", "PodOutOfMemory", f"{text} ({given})"[:MAX_MESSAGE]))
    if (report := parsed.report) is not None and report.plan_number == accepted.plan.number:
        record = _of_ranks(report, accepted, record)
    if (record.memory_digest, record.memory_kills) != (known.memory_digest, known.memory_kills):
        draft.requeue_in(0.0)  # Only a stored record leads to a plan with more memory.
    _explain(parsed, draft, accepted, record)
    return parsed if record == known else replace(parsed, accepted=accepted.with_failures(record))


def _of_pods(parsed: ParsedJob, now: datetime) -> list[tuple[PodSeen, str]]:
    """Return the pods that ended at their limit lately, the first one first, with keys for ``FailureRecord.killed``.

    A pod that stops is left out: the kubelet ends it with SIGKILL if it takes too long, and also gives this reason if
    the kernel ended a rank in it before.
    """
    found = [pod for pod in parsed.observed.pods if pod.memory_killed_at and not pod.deleting]
    recent = [pod for pod in found if _is_recent(pod.memory_killed_at, now)]
    return [(pod, f"{pod.uid}/{pod.memory_killed_at}") for pod in sorted(recent, key=lambda pod: pod.memory_killed_at)]


def _is_together(pod: PodSeen, record: FailureRecord) -> bool:
    """Return True if the end of a pod belongs to the end of another pod that was counted last, in the same attempt.

    The spec may have changed since then: the same pods may run on under the new one.
    """
    if not record.killed_at:
        return False
    try:
        first, at = (datetime.fromisoformat(text) for text in (record.killed_at, pod.memory_killed_at))
        if (at - first).total_seconds() >= TOGETHER_S:
            return False
    except (ValueError, TypeError):
        return False
    # Times of one format are in the order of their texts.
    again = (key.rpartition("/") for key in record.killed)
    return not any(uid == pod.uid and record.killed_at <= seen < pod.memory_killed_at for uid, _, seen in again)


def _has_room(record: FailureRecord, killed_at: str) -> bool:
    """Return True if an end that does not count by itself can be recorded, so that its event is posted only once.

    The record has a limited length. It has no room for ends before the one that was counted last.
    """
    recorded = sum(key.rpartition("/")[2] >= record.killed_at for key in record.killed)
    return killed_at >= record.killed_at and recorded < MAX_EVICTED


def _is_recent(killed_at: str, now: datetime) -> bool:
    """Return True if a pod ended within ``RECENT_S``, or if its time cannot be read."""
    try:
        return (now - datetime.fromisoformat(killed_at)).total_seconds() < RECENT_S
    except (ValueError, TypeError):
        return True


def _of_ranks(report: Report, accepted: StoredPlan, record: FailureRecord) -> FailureRecord:
    """Return the record with an end of a rank at the memory limit added, if the report shows one for the first time.

    A job without a record may have recovered under an earlier release of the operator, and must not restart now.
    """
    failure, seen = report.failure, report.restarts.get(reasons.OUT_OF_MEMORY, 0)
    of_memory = failure is not None and failure.reason == reasons.OUT_OF_MEMORY
    if of_memory and report.phase is RunPhase.FAILED:
        seen += 1  # No restart follows the failure with which a job fails.
    if seen == record.rank_kills_seen:
        return record
    more = seen > record.rank_kills_seen
    record = record.model_copy(update={"rank_kills_seen": seen})
    if failure is None or not more or (accepted.failures is None and report.phase is RunPhase.RUNNING):
        return record
    rank = f"rank {failure.rank}" if failure.rank is not None else "a rank"
    where = f"{rank} in pod {failure.host or '(unknown)'}"
    if not of_memory:
        # Another failure has followed since the last report that the operator saw. The report has only its exit code,
        # without which ranks that lack memory of a GPU look the same.
        if any(rank.gpu for rank in accepted.plan.ranks):
            return record
        where = "a rank"
    elif failure.exit_code != SIGKILLED:  # A rank that reports by itself that a GPU lacks memory.
        return record
    return _with(record, accepted, f"{where} ended at the memory limit of its pod", failure.host or "")


def _with(record: FailureRecord, accepted: StoredPlan, text: str, pod: str) -> FailureRecord:
    """Return the record with one more end at the memory limit in a pod, for which ``text`` says what happened."""
    changes: dict[str, object] = {"memory_kill": text[:2048], "memory_digest": computation_digest(accepted.spec)}
    changes["killed_nbytes"] = _memory_of(accepted, pod)
    if not record.counts_memory_of(accepted.spec):
        changes |= {"pod_kills": 0, "memory_answered": 0, "memory_nbytes": 0, "memory_exceeded_nbytes": 0}
        changes["memory_kills"] = 1
    else:
        changes["memory_kills"] = record.memory_kills + 1
    return record.model_copy(update=changes)


def _memory_of(accepted: StoredPlan, pod: str) -> int:
    """Return the memory request in bytes of a pod of the plan; that of the largest pods for an unknown name."""
    group = next((rank.group for rank in accepted.plan.ranks if rank.pod == pod), "")
    return accepted.memory_of(group)


def _amount(parsed: ParsedJob, planned_nbytes: int) -> str:
    asked = parsed.spec.resources.memory if parsed.spec is not None else None
    return f"spec.resources.memory: {asked}" if asked else f"{gibibytes(planned_nbytes)}, as planned"


def _explain(parsed: ParsedJob, draft: Draft, accepted: StoredPlan, record: FailureRecord) -> None:
    """Add the condition MemoryExceeded, unless ``planning.more_memory`` adds it in the same reconcile."""
    assert parsed.spec is not None
    shown = find(parsed.before.conditions, CONDITION)
    if not record.counts_memory_of(accepted.spec):
        if shown is not None:
            text = "no pod has reached its memory limit since the spec changed"
            draft.verdicts.append(Verdict(CONDITION, FALSE, "SpecChanged", text))
        return
    given = _amount(parsed, record.exceeded_nbytes(accepted.memory_nbytes))
    text = f"{record.memory_kill} ({given}). Number of such ends: {record.memory_kills}"
    if parsed.spec.resources.memory:
        remedy = "Set a larger spec.resources.memory, or remove the field, so that the operator raises the memory"
        draft.verdicts.append(Verdict(CONDITION, TRUE, "MemoryTooSmall", f"{text}. {remedy}"))
    elif parsed.queued:
        remedy = "Kueue has admitted this amount: set spec.resources.memory to more"
        draft.verdicts.append(Verdict(CONDITION, TRUE, "CannotRaise", f"{text}. {remedy}"))
    elif record.memory_kills > record.memory_answered:
        draft.verdicts.append(Verdict(CONDITION, TRUE, "Raising", f"{text}. The next plan gives pods more memory"))
    elif record.memory_nbytes > 0 and (shown is None or shown.reason != "CannotRaise"):
        script = bool(parsed.spec.trainer.command)
        draft.verdicts.append(Verdict(CONDITION, TRUE, "Raised", raised(record, script=script)))
    elif shown is not None and shown.reason == "CannotRaise":
        draft.verdicts.append(Verdict(CONDITION, TRUE, shown.reason, shown.message))
    else:  # The status with the reason was not written, or the spec is again as it was then.
        remedy = "No plan gave pods more memory: lower the batch size, or add nodes with more memory"
        draft.verdicts.append(Verdict(CONDITION, TRUE, "CannotRaise", f"{text}. {remedy}"))


def raised(record: FailureRecord, *, script: bool) -> str:
    """Return the message of the reason Raised, with the memory that pods request since.

    ``script``: True for a training script, whose memory profiles store for its next jobs.
    """
    text = f"{record.memory_kill}; since then, each pod requests {gibibytes(record.memory_nbytes)}"
    if script:
        return f"{text}. The next job of this script in this namespace begins with what this one needs"
    return (
        f"{text}. Set spec.resources.memory: {-(-record.memory_nbytes // 2**20)}Mi, so that the next such job begins "
        "with it"
    )


def at_end(parsed: ParsedJob, draft: Draft) -> None:
    """Say in the condition MemoryExceeded that no plan with more memory follows, because the job has ended."""
    shown = next((each for each in draft.verdicts if (each.type, each.reason) == (CONDITION, "Raising")), None)
    if shown is None or parsed.spec is None or parsed.accepted is None or parsed.accepted.failures is None:
        return
    record = parsed.accepted.failures
    text = f"({_amount(parsed, record.exceeded_nbytes(parsed.accepted.memory_nbytes))}), and the job ended"
    remedy = "For the next such job, set spec.resources.memory to more"
    if parsed.spec.trainer.command and any(each.type == "Failed" for each in draft.verdicts):
        remedy = "The next job of this script in this namespace begins with more"
    draft.verdicts.remove(shown)
    draft.verdicts.append(Verdict(CONDITION, TRUE, "JobEnded", f"{record.memory_kill} {text}. {remedy}"))


def ending(parsed: ParsedJob) -> Verdict | None:
    """Return the verdict Failed if ends of pods at their memory limit have made the job fail; None otherwise.

    It has failed if these, evictions because of storage, and the failures of the training script together exceed the
    backoff limit. Without such an end of a pod, the result is None. Ends of single ranks are failures that the
    coordinator counts.
    """
    accepted, report = parsed.accepted, parsed.report
    record = accepted.failures if accepted is not None else None
    if accepted is None or record is None or not record.pod_kills or not record.counts_memory_of(accepted.spec):
        return None
    limit = accepted.plan.backoff_limit
    failures = max(0, report.failures - record.ignored) if report is not None else 0
    others = failures + (record.evictions if record.eviction_digest == accepted.spec_digest else 0)
    if record.pod_kills + others <= limit:
        return None
    more = f" and {others} other failures" if others else ""
    given = _amount(parsed, record.exceeded_nbytes(accepted.memory_nbytes))
    text = (
        f"pods ended {record.pod_kills} times, because they reached their memory limit ({given}){more}, "
        f"and spec.runPolicy.backoffLimit is {limit}; last: {record.memory_kill}. Set a larger "
        "spec.resources.memory, or lower the batch size"
    )
    return Verdict("Failed", TRUE, reasons.OUT_OF_MEMORY, text)
