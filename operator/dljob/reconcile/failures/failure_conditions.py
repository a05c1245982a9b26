"""Apply the rules of ``spec.runPolicy.failureRules`` that are about conditions of nodes and pods.

These rules decide later about failures that the coordinator has counted already. The coordinator itself applies rules
about exit codes and reasons (``dlcontract.failure_rules``), in the second in which ranks fail. It cannot read nodes,
and Kubernetes learns of a broken node up to a minute later. Therefore, the operator looks at the failed rank's node and
pod for ``WINDOW_S`` after a failure. If a rule then says Ignore, the operator tells the coordinator that one failure
more does not count. Meanwhile, the ranks train again. If the failure would end the job, the coordinator waits instead.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from dlcontract import Report, RunPhase, matching
from dljob.api import FailureRule
from dljob.api.spec import ConditionPattern, FailureAction
from dljob.job.observed import Conditions
from dljob.job.plan.failures import MAX_OPEN, FailureRecord, OpenFailure
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.status import TRUE, Event, Verdict

WINDOW_S = 120.0
"""Seconds after a failure during which a condition can still decide whether the failure counts.

Kubernetes reports a node as NotReady 40 to 50 s after the node has failed. The node-problem-detector checks every 10 to
60 s.
"""
WAIT_S = WINDOW_S + 5.0
"""Seconds that the coordinator waits before a failure beyond the backoff limit fails the job. They exceed ``WINDOW_S``,
because the operator notices a failure later than the coordinator."""
END_S = WINDOW_S + 20.0
"""Seconds from a failure until the operator fails a job with too many failures, if its coordinator has not done so."""
RECHECK_S = 5.0
"""Seconds between looks at the conditions. Changes of a node do not cause a reconcile of the jobs on it."""


def carried(parsed: ParsedJob, target: StoredPlan) -> StoredPlan:
    """Return the plan ``target`` with the record of the job's failures, so that a new plan does not lose it.

    The plan gets no record if the job's current plan has none, and no rule is about conditions of nodes or pods.
    """
    if target.failures is not None:
        return target
    found = parsed.accepted.failures if parsed.accepted is not None else None
    if found is None and any(_rules(parsed)):
        found = FailureRecord(wait_s=_wait_s(parsed), seen=parsed.report.failures if parsed.report else 0)
    return target if found is None else target.with_failures(found)


def recorded(parsed: ParsedJob, draft: Draft, now: datetime) -> ParsedJob:
    """Return the job with an updated record of failures in its stored plan.

    Failures that the report shows for the first time are added, and earlier ones that a rule says to ignore become
    ignored failures. Add events about these to the draft. If the record does not change, return ``parsed`` itself.
    """
    accepted, report = parsed.accepted, parsed.report
    if accepted is None:
        return parsed
    rules, before = list(_rules(parsed)), accepted.failures
    if not rules and before is None:
        return parsed
    if not rules:
        assert before is not None
        record = before.model_copy(update={"open": (), "wait_s": 0.0})
    else:
        seen = report.failures if report is not None else 0
        record = (before or FailureRecord(seen=seen)).model_copy(update={"wait_s": _wait_s(parsed)})
        if report is not None and report.plan_number == accepted.plan.number and report.phase is not RunPhase.FAILED:
            record = _decided(parsed, draft, _noted(parsed, accepted, report, record, now), now)
    return parsed if record == before else replace(parsed, accepted=accepted.with_failures(record))


def ignored(accepted: StoredPlan) -> int:
    """Return the number of failures that the coordinator has counted, but that do not count because of a rule."""
    return accepted.failures.ignored if accepted.failures is not None else 0


def undecided(parsed: ParsedJob) -> bool:
    """Return True if a rule may still ignore a failure. In that case, too many failures do not fail the job yet."""
    return parsed.accepted is not None and parsed.accepted.failures is not None and bool(parsed.accepted.failures.open)


def ending(parsed: ParsedJob, now: datetime) -> Verdict | None:
    """Return the verdict Failed if a rule about conditions of nodes or pods says FailJob for a recent failure.

    Otherwise return None. A failure is recent for ``WINDOW_S`` seconds.
    """
    record = parsed.accepted.failures if parsed.accepted is not None else None
    for failure in record.open if record is not None else ():
        found = _matching(parsed, failure, now)
        if found is not None and found[1] is FailureAction.FAIL_JOB:
            return Verdict("Failed", TRUE, failure.reason, f"{_where(failure)} failed: {failure.reason}; {found[0]}")
    return None


def _rules(parsed: ParsedJob) -> Iterator[tuple[int, FailureRule]]:
    """Yield (number in the spec, rule) for each rule about conditions of nodes or pods."""
    spec = parsed.spec or (parsed.accepted.accepted_spec() if parsed.accepted is not None else None)
    for number, rule in enumerate(spec.run_policy.failure_rules if spec is not None else ()):
        if rule.on_pod_conditions is not None or rule.on_node_conditions is not None:
            yield number, rule


def _wait_s(parsed: ParsedJob) -> float:
    """Return the seconds that the coordinator waits before it fails a job with too many failures.

    Return 0 if the job has no rule that can ignore a failure because of a condition.
    """
    return WAIT_S if any(rule.action is FailureAction.IGNORE for _, rule in _rules(parsed)) else 0.0


def _noted(
    parsed: ParsedJob, accepted: StoredPlan, report: Report, record: FailureRecord, now: datetime
) -> FailureRecord:
    """Return the record of failures, with the failure in the report added if rules about conditions may decide on it.

    The failure is not added if the record has it already, if it does not count anyway, if a rule that the coordinator
    applies itself (about exit codes and reasons) decides on it, or if the pod of the failed rank is unknown.
    """
    if report.failures < record.seen:  # The coordinator counts from 0 again.
        record = record.model_copy(update={"ignored": 0, "seen": 0, "open": ()})
    if report.failures == record.seen:
        return record
    record = record.model_copy(update={"seen": report.failures})
    failure = report.failure
    if failure is None or not (failure.counts and failure.retry) or matching(accepted.plan.failure_rules, failure):
        return record
    # With the host's network, the host name of a rank is that of the node.
    pods = (pod for pod in parsed.observed.pods if failure.host in (pod.name, pod.node))
    pod = next((pod for pod in pods if pod.node is not None), None)
    if pod is None or pod.node is None:
        return record
    new = OpenFailure(
        number=report.failures,
        reason=failure.reason,
        rank=failure.rank,
        pod=pod.name,
        uid=pod.uid,
        node=pod.node,
        at=now,
    )
    return record.model_copy(update={"open": (*record.open, new)[-MAX_OPEN:]})


def _decided(parsed: ParsedJob, draft: Draft, record: FailureRecord, now: datetime) -> FailureRecord:
    """Return the record without the failures on which a decision is final.

    These are the failures that a rule ignores, which are counted in ``ignored`` and get an event, and failures older
    than ``END_S``, which count. While other failures remain, requeue the job to look at the conditions again.
    """
    ignored, waiting = record.ignored, []
    for failure in record.open:
        found = _matching(parsed, failure, now)
        if found is not None and found[1] is FailureAction.IGNORE:
            ignored += 1
            text = f"failure {failure.number} ({failure.reason}, {_where(failure)}) does not count: {found[0]}"
            draft.events.append(Event("Normal", "FailureIgnored", text))
            continue
        left_s = (failure.at + timedelta(seconds=END_S) - now).total_seconds()
        if left_s > 0:
            waiting.append(failure)
            draft.requeue_in(min(RECHECK_S, left_s))
    return record.model_copy(update={"ignored": ignored, "open": tuple(waiting)})


def _matching(parsed: ParsedJob, failure: OpenFailure, now: datetime) -> tuple[str, FailureAction] | None:
    """Return (why the rule applies, its action) for the first rule that applies to a failure.

    Return None if no rule applies, or if the failure is older than ``WINDOW_S``.
    """
    if now > failure.at + timedelta(seconds=WINDOW_S):
        return None
    pods = (pod.conditions for pod in parsed.observed.pods if pod.uid == failure.uid)
    of_pod, of_node = next(pods, ()), parsed.observed.node_conditions.get(failure.node, ())
    for number, rule in _rules(parsed):
        for what, patterns, conditions in (
            (f"pod {failure.pod}", rule.on_pod_conditions, of_pod),
            (f"node {failure.node}", rule.on_node_conditions, of_node),
        ):
            if (found := _held(patterns or (), conditions)) is not None:
                text = (
                    f"{what} has the condition {found}; spec.runPolicy.failureRules[{number}] says {rule.action.value}"
                )
                return text, rule.action
    return None


def _held(patterns: tuple[ConditionPattern, ...], conditions: Conditions) -> str | None:
    """Return the first pattern that one of ``conditions`` matches, as text such as "Ready=Unknown"; None: no match."""
    wanted = ((item.type, item.status.value if item.status is not None else "True") for item in patterns)
    return next(("=".join(pair) for pair in wanted if pair in conditions), None)


def _where(failure: OpenFailure) -> str:
    rank = f"rank {failure.rank} on " if failure.rank is not None else ""
    return f"{rank}pod {failure.pod} on node {failure.node}"
