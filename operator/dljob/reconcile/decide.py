"""The main decision: the desired state of a job from its observed state."""

from dataclasses import replace
from datetime import datetime, timedelta

from dljob.api import DLJobSpec, PlanningMode, PlanStatus
from dljob.job.observed import Observed
from dljob.job.stored_plan import StoredPlan
from dljob.planner import Infeasible
from dljob.reconcile import planning, replan, run
from dljob.reconcile.desired import Desired, Draft
from dljob.reconcile.fence import fence
from dljob.reconcile.parsed import ParsedJob, parse_observed
from dljob.reconcile.rollout import bring_down, bring_up, in_force, quiet
from dljob.reconcile.volume import blocks, volume_ready
from dljob.render import RenderConfig
from dljob.status import FALSE, TRUE, Verdict, build, events, find, pods_ready

RECHECK_S = 30.0
"""Seconds after which a job that waits for something external is reconciled again; most changes also cause an event."""


def needs_view(observed: Observed, parsed: ParsedJob | None = None) -> bool:
    """Return True if ``reconcile`` would plan. It then needs a ClusterView, which costs a list of all pods."""
    if observed.job.deleting:
        return False
    known = parsed or parse_observed(observed)
    return planning.wants_plan(known) or (not known.finished and replan.undecided(known))


def reconcile(observed: Observed, config: RenderConfig, now: datetime, parsed: ParsedJob | None = None) -> Desired:
    """Return the whole desired state of one job. ``observed.view`` is required if ``needs_view`` returns True.

    ``parsed``: the result of ``parse_observed`` for the same job, if the caller has it already.
    """
    if observed.job.deleting:
        return Desired()  # The garbage collector deletes the job's objects by their owner references.
    known = replace(parsed, observed=observed) if parsed else parse_observed(observed)
    draft = Draft()
    if known.finished:
        return _finished(known, draft, now)
    if known.spec is None:
        draft.verdicts.append(Verdict("Accepted", FALSE, "InvalidSpec", known.spec_problem or ""))
        return _without_spec(known, draft, now)
    draft.verdicts.append(Verdict("Accepted", TRUE, "Accepted", "the spec is valid"))
    if observed.leftovers:
        return _after_predecessor(known, draft, now)
    if known.accepted is not None and (end := run.ending(known, now)):
        return _end(known, draft, end, now)
    target, plan_only = _plan(known, draft, config, now)
    if known.spec.suspend:
        _suspend(known, draft)
    elif plan_only is not None or known.spec.planning.mode is PlanningMode.PLAN_ONLY:
        bring_down(draft, observed)
    elif target is not None:
        _roll(known, draft, known.spec, target, config, now)
    accepted = known.accepted if known.accepted is not None and not quiet(observed) else target or known.accepted
    return _finish(known, draft, accepted, now, plan_only=plan_only)


def _plan(
    known: ParsedJob, draft: Draft, config: RenderConfig, now: datetime
) -> tuple[StoredPlan | None, PlanStatus | None]:
    """Return the plan that should be in force, and the plan that is only shown (mode PlanOnly)."""
    assert known.spec is not None
    if not planning.wants_plan(known):
        if known.accepted is not None and known.spec.planning.mode is not PlanningMode.PLAN_ONLY:
            target = replan.replan(known, draft, config, now)
            draft.verdicts.append(planning.planned(target or known.accepted))
            return target, None
        return known.accepted, None
    decision = planning.decide(known, config)
    if isinstance(decision, Infeasible):
        draft.verdicts.append(planning.infeasible(decision, known.accepted))
        draft.requeue_in(planning.RETRY_S if decision.transient else 4 * planning.RETRY_S)
        return known.accepted, None
    plan_only = known.spec.planning.mode is PlanningMode.PLAN_ONLY
    replan.unjudged(known, draft, decision)
    draft.verdicts.append(planning.planned(decision, plan_only=plan_only))
    return (None, decision.status) if plan_only else (decision, None)


def _suspend(known: ParsedJob, draft: Draft) -> None:
    observed = known.observed
    bring_down(draft, observed)
    if quiet(observed):
        draft.verdicts.append(
            Verdict("Suspended", TRUE, "Suspended", "spec.suspend is true, and all pods have stopped")
        )
    else:
        text = f"{len(observed.pods)} pods are writing a last checkpoint before they stop"
        draft.verdicts.append(Verdict("Suspended", FALSE, "Suspending", text))
    if known.accepted is not None:
        draft.verdicts.append(Verdict("Running", FALSE, "NotStarted", "the job is suspended"))


def _roll(
    known: ParsedJob, draft: Draft, spec: DLJobSpec, target: StoredPlan, config: RenderConfig, now: datetime
) -> None:
    """Bring up the pods of the target plan. First stop all pods of another plan."""
    observed, current = known.observed, known.accepted
    if find(known.before.conditions, "Suspended") is not None:
        draft.verdicts.append(Verdict("Suspended", FALSE, "NotSuspended", "spec.suspend is false"))
    changed = current is None or current.revision != target.revision
    if (changed or not in_force(observed, target)) and not quiet(observed):
        bring_down(draft, observed)
        why = "the spec has changed" if current is None or target.replans == 0 else "another plan is better"
        text = f"{why}: {len(observed.pods)} pods write a checkpoint and stop before the new pods start"
        draft.verdicts.append(Verdict("Running", FALSE, "Restarting", text))
        return
    volume = volume_ready(observed, spec, target)
    draft.verdicts.append(volume)
    if blocks(volume) and quiet(observed):
        draft.verdicts.append(
            Verdict("Running", FALSE, "NotStarted", "a volume is not usable; see the condition VolumeReady")
        )
        draft.requeue_in(RECHECK_S)
        return
    target = fence(known, draft, spec, target, now)
    bring_up(draft, observed, spec, target, config)
    draft.verdicts.append(run.running(known, target))
    if end := run.deadline(known, now):
        draft.requeue_in((end - now).total_seconds())


def _end(known: ParsedJob, draft: Draft, verdict: Verdict, now: datetime) -> Desired:
    """End the job: set its outcome in the status and remove its pods."""
    draft.verdicts.append(verdict)
    if known.spec is not None and known.report is not None and verdict.type == "Complete":
        draft.measurements = run.measurements(known.spec, known.report, known.accepted)
    return _finished(known, draft, now, just_now=True)


def _finished(known: ParsedJob, draft: Draft, now: datetime, *, just_now: bool = False) -> Desired:
    bring_down(draft, known.observed)
    draft.verdicts.append(Verdict("Running", FALSE, "Finished", "the job is over"))
    ended = now if just_now else known.before.completion_time or now
    ttl_s = known.spec.run_policy.ttl_seconds_after_finished if known.spec else None
    if ttl_s is not None:
        left_s = (ended + timedelta(seconds=ttl_s) - now).total_seconds()
        if left_s <= 0 and not just_now:
            return Desired(delete_job=True)
        draft.requeue_in(left_s)
    return _finish(known, draft, known.accepted, now)


def _without_spec(known: ParsedJob, draft: Draft, now: datetime) -> Desired:
    """Leave a job with an invalid spec running under its plan, and create nothing."""
    if known.accepted is None:
        return _finish(known, draft, None, now)
    if end := run.ending(known, now):
        return _end(known, draft, end, now)
    draft.wanted = sum(item.replicas for item in known.observed.sets)
    draft.verdicts.append(run.running(known, known.accepted))
    return _finish(known, draft, known.accepted, now)


def _after_predecessor(known: ParsedJob, draft: Draft, now: datetime) -> Desired:
    """Wait until objects with the job's names are gone that another owner has, such as a deleted job of this name."""
    text = (
        f"found {', '.join(known.observed.leftovers)} with another owner; the job waits until they are gone: delete "
        "them, or choose another job name"
    )
    draft.verdicts.append(Verdict("PodsReady", FALSE, "NamesTaken", text))
    draft.requeue_in(1.0)
    return _finish(known, draft, known.accepted, now)


def _finish(
    known: ParsedJob, draft: Draft, accepted: StoredPlan | None, now: datetime, *, plan_only: PlanStatus | None = None
) -> Desired:
    if accepted is not None and not any(verdict.type == "PodsReady" for verdict in draft.verdicts):
        draft.verdicts.append(pods_ready(known.observed, draft.wanted))
    draft.verdicts.extend(run.mentions(known))
    status = build(
        known.observed, known.before, draft.verdicts, accepted, known.report, now,
        wanted=draft.wanted, plan_only=plan_only,
    )  # fmt: skip
    return Desired(
        objects=tuple(draft.objects),
        secret=draft.secret,
        scales=tuple(draft.scales),
        deletes=tuple(draft.deletes),
        status=status,
        events=events(known.before.conditions, status.conditions),
        requeue_after_s=min(draft.requeues_s, default=None),
        measurements=draft.measurements,
        plan=draft.plan,
    )
