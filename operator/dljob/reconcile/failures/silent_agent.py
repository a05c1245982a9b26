"""Jobs whose agent runs and reports nothing, because it is older than the plan or cannot reach the API server.

The image of a job may be older than the operator: ``spec.trainer.image`` names a fixed one, or the chart value
``trainer.image`` does. Its agent ignores a plan that it cannot read, and the job would stay at its start without a
cause. The operator cannot ask an agent for its release, so the message names what the plan uses that earlier releases
lack, and where the agent's own words are.
"""

from datetime import datetime

from dlcontract import newer_parts
from dljob.api import DLJobSpec
from dljob.api.spec.trainer import AgentSource
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.status import FALSE, Verdict

SILENT_S = 120.0
"""Seconds without a report after which an agent is silent.

Agents report within seconds of their start, but much later where other pods hold all processors."""


def explained(parsed: ParsedJob, draft: Draft, running: Verdict, target: StoredPlan, now: datetime) -> Verdict:
    """Return the condition ``running`` of a job, or one that says that the agent of its first pod is silent.

    If that agent may still report in time, requeue the job for the end of this time.
    """
    report, first = parsed.report, target.plan.pods[0]
    if (running.status, running.reason) != (FALSE, "Starting") or parsed.spec is None:
        return running
    if parsed.report_problem is not None or (report is not None and report.plan_number == target.plan.number):
        return running
    pod = next((pod for pod in parsed.observed.pods if pod.name == first and not pod.deleting), None)
    if pod is None or pod.ready or pod.running_since is None:
        return running
    left_s = SILENT_S - (now - pod.running_since).total_seconds()
    if left_s > 0:
        draft.requeue_in(left_s)
        return running
    text = (
        f"pod {pod.name}: found no report about plan {target.plan.number} {SILENT_S:g} s after the agent's start; "
        f"expected one within seconds. {_cause(parsed.spec, target)}kubectl logs {pod.name} has the agent's reason"
    )
    return Verdict("Running", FALSE, "AgentSilent", text)


def _cause(spec: DLJobSpec, target: StoredPlan) -> str:
    """Return a text with what the plan uses that agents of earlier releases lack; empty if there is nothing."""
    parts = [f"{name} (release {release})" for name, release in newer_parts(target.plan)]
    if not parts:
        return ""
    own = spec.trainer.image if spec.trainer.agent_source is not AgentSource.INJECTED else None
    where = f"spec.trainer.image {own}" if own else "the image of the chart value trainer.image"
    return (
        f"If the agent of {where} is older than the operator, it rejects the plan, which uses {', '.join(parts)}: use "
        "an image of the operator's release, or do without these. "
    )
