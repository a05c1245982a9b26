"""Give the pods of a job more memory after ranks or pods ended at their memory limit (``failures.memory_kills``)."""

from collections.abc import Mapping
from types import MappingProxyType

from dljob.api import PlanningMode
from dljob.job.plan.failures import FailureRecord
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible
from dljob.planner.types.texts import gibibytes
from dljob.reconcile.desired import Draft
from dljob.reconcile.failures.memory_kills import CONDITION
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import make_plan
from dljob.render import RenderConfig, plan_config_map
from dljob.status import TRUE, Verdict

_OTHER_CAUSES = {"NodesLeftOut", "Queued", "MakingRoom"}
"""Reasons of ``Infeasible`` that are not about memory. Nodes with too little free memory count as busy."""


def undecided(parsed: ParsedJob) -> bool:
    """Return True if the job must be planned again, because pods reached their memory limit.

    Only one attempt is made for each end at the limit. Kueue's admission fixes the memory of pods.
    """
    spec, accepted = parsed.spec, parsed.accepted
    if spec is None or accepted is None or spec.suspend or parsed.queued or len(parsed.memory_to_try) < 2:
        return False
    return accepted.spec_digest == parsed.digest and spec.planning.mode is not PlanningMode.PLAN_ONLY


def raise_memory(parsed: ParsedJob, draft: Draft, config: RenderConfig) -> StoredPlan | None:
    """Return the plan with which the pods of a job get more memory; None if they need none. Add MemoryExceeded.

    If no node has more memory, return the present plan, with a record that the operator has looked for more.
    """
    accepted = parsed.accepted
    if accepted is None or accepted.failures is None or not undecided(parsed) or not make_plan.ready(parsed):
        return None
    record, found = accepted.failures, make_plan.decide(parsed, config)
    exceeded_nbytes = record.exceeded_nbytes(accepted.memory_nbytes)
    if isinstance(found, Infeasible) or found.new_nodes or found.least_memory_nbytes <= exceeded_nbytes:
        return _kept(parsed, draft, accepted, record, found)
    text = (
        f"{record.memory_kill} ({gibibytes(exceeded_nbytes)}); pods stop, and start again with "
        f"{gibibytes(found.least_memory_nbytes)}{' or more' if found.memory_by_group else ''}"
    )
    _replace(draft, Verdict(CONDITION, TRUE, "Raising", text))
    return replacing(accepted, found)


def start_without(parsed: ParsedJob, draft: Draft, found: Infeasible) -> None:
    """Let a job without pods, for which no plan with more memory is possible, be planned again with its present memory.

    Do nothing if it needs no more memory, or if ``found`` has another cause.
    """
    accepted = parsed.accepted
    if accepted is None or accepted.failures is None or not undecided(parsed) or found.reason in _OTHER_CAUSES:
        return
    kept = _kept(parsed, draft, accepted, accepted.failures, found)
    draft.objects.append(plan_config_map(parsed.observed.job, kept))
    draft.requeue_in(0.0)


def _kept(
    parsed: ParsedJob, draft: Draft, accepted: StoredPlan, record: FailureRecord, found: StoredPlan | Infeasible
) -> StoredPlan:
    """Return the present plan with a record that the operator has looked for more memory. Add MemoryExceeded."""
    why = f"{found.field}: {found.message}" if isinstance(found, Infeasible) else "no node has more free memory"
    text = (
        f"{record.memory_kill} ({gibibytes(record.exceeded_nbytes(accepted.memory_nbytes))}), and no plan gives pods "
        f"at least {gibibytes(parsed.memory_to_try[-1])}: {why}. Lower the batch size, or add nodes with more memory"
    )
    _replace(draft, Verdict(CONDITION, TRUE, "CannotRaise", text))
    return accepted.with_failures(_answered(record))


def replacing(accepted: StoredPlan | None, found: StoredPlan) -> StoredPlan:
    """Return the new plan ``found`` as one that follows ``accepted``, a plan whose pods reached their memory limit."""
    if accepted is None or accepted.failures is None or not accepted.failures.counts_memory_of(found.spec):
        return found
    record = accepted.failures
    if record.memory_kills <= record.memory_answered:
        return found
    if accepted.spec_digest == found.spec_digest:
        counts = {"replans": accepted.replans + 1, "resizes": (accepted.resizes or 0) + 1}
        found = found.model_copy(update=counts)
    elif found.least_memory_nbytes <= record.exceeded_nbytes(accepted.memory_nbytes):
        return found.with_failures(_answered(record))  # No node has more for the changed spec.
    raised = {
        "memory_nbytes": found.least_memory_nbytes,
        "memory_exceeded_nbytes": record.exceeded_nbytes(accepted.memory_nbytes),
    }
    return found.with_failures(_answered(record, raised))


def _answered(record: FailureRecord, raised: Mapping[str, int] = MappingProxyType({})) -> FailureRecord:
    return record.model_copy(update={"memory_answered": record.memory_kills, **raised})


def _replace(draft: Draft, verdict: Verdict) -> None:
    draft.verdicts[:] = [each for each in draft.verdicts if each.type != CONDITION]
    draft.verdicts.append(verdict)
