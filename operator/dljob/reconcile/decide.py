"""Decide on the desired state of a job from its observed state. This is the entry point of the package."""

from dataclasses import replace
from datetime import datetime

from dljob.api import DLJobSpec, PlanningMode, PlanStatus
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible
from dljob.reconcile import gang, look, run
from dljob.reconcile.admission import kueue, names, preempted, priority_class, provisioning, quota
from dljob.reconcile.deadline_risk import with_deadline_risk
from dljob.reconcile.desired import Desired, Draft
from dljob.reconcile.failures import failure_conditions, memory_kills, silent_agent, storage_evictions
from dljob.reconcile.failures.fence import fence, fence_deleted, fence_without_spec, stop
from dljob.reconcile.forecasts import deadline_in_s, place_of, queue_text, with_forecasts
from dljob.reconcile.parsed import ParsedJob, parse_observed
from dljob.reconcile.planning import make_plan, more_memory, node_faults, plan_edits, replan, resize, same_pods
from dljob.reconcile.planning.deadlines import with_waited
from dljob.reconcile.planning.rest import with_pace
from dljob.reconcile.rollout import bring_up, end_conditions_of_former_plan, in_force, quiet
from dljob.reconcile.spec.changes import after_end
from dljob.reconcile.spec.task import Looking
from dljob.reconcile.spec.variables import accepted_verdict
from dljob.reconcile.usage import with_usage
from dljob.reconcile.volume import blocks, volume_ready
from dljob.render import Names, RenderConfig
from dljob.status import FALSE, TRUE, Verdict, build, events, find, pods_ready, previous, unscheduled_in_s
from dljob.status.conditions import merge, phase

RECHECK_S = 30.0
"""Seconds after which a job that waits for a usable volume is reconciled again.

Most changes in the cluster also cause a watch event, which starts a reconcile earlier.
"""


def needs_view(observed: Observed, parsed: ParsedJob | None = None, now: datetime | None = None) -> bool:
    """Return True if ``reconcile`` would plan this job.

    Then ``reconcile`` needs ``observed.view``, the cluster's free resources, or ``ParsedJob.decision``, the result of
    planning. If it has neither, it leaves the job as it is. ``now``: present time; None: ignore waiting times, such as
    a back-off. During a back-off (``gang``), a job must not be planned, because its plan would reserve
    capacity.
    """
    if observed.job.deleting or names.taken(observed):
        return False
    parsed = parsed or parse_observed(observed)
    parsed = replace(parsed, observed=observed)
    if parsed.queued:
        return kueue.wants_plan(parsed, now)
    if preempted.stops(parsed) or priority_class.missing(parsed) or priority_class.keeps_plan(parsed):
        return False
    if make_plan.wants_plan(parsed):
        return True
    if gang.awaits_nodes(parsed):
        return provisioning.may_start_earlier(parsed)
    if gang.waits(parsed):
        return now is None or gang.back_off_left_s(parsed, now) <= 0
    moves = replan.undecided(parsed) or node_faults.undecided(parsed) or more_memory.undecided(parsed)
    return not parsed.finished and (moves or resize.undecided(parsed, now))


def reconcile(observed: Observed, config: RenderConfig, now: datetime, parsed: ParsedJob | None = None) -> Desired:
    """Return the whole desired state of one job.

    ``parsed``: the result of ``parse_observed`` for the same job, if the caller has it already. It may contain the
    result of planning (``ParsedJob.decision``). A job whose plan is still being made continues as before, see
    ``needs_view``.
    """
    if observed.job.deleting:
        return fence_deleted(observed, now)  # The garbage collector deletes the job's objects by their owners.
    if parsed is None:
        parsed = with_pace(parse_observed(observed, defaults=config.job_defaults), now)
    parsed = replace(parsed, observed=observed)
    parsed = gang.with_timeouts_of_spec(gang.with_rejections_of_attempt(parsed))
    observed, draft = parsed.observed, Draft()
    if parsed.finished:
        job = observed.job
        if parsed.own_spec and (change := after_end(parsed.own_spec, job.generation, parsed.before, parsed.accepted)):
            draft.verdicts.append(change)
        return _finished(parsed, draft, now)
    draft.verdicts.extend(plan_edits.verdicts(parsed))
    recorded = failure_conditions.recorded(parsed, draft, now)
    parsed = memory_kills.counted(storage_evictions.counted(recorded, draft), draft, now)
    draft.counts_anew = parsed.accepted is not recorded.accepted
    if parsed.looking is not None:
        return _looking(parsed, parsed.looking, draft, config, now)
    if parsed.spec is None:
        assert parsed.refusal is not None, "a job without a spec says why"
        draft.verdicts.append(parsed.refusal)
        if parsed.refusal.reason == "SecretNotUsable":
            draft.requeue_in(RECHECK_S)  # The operator does not watch Secrets.
        return _without_spec(parsed, draft, now)
    draft.verdicts.append(parsed.refusal or accepted_verdict(parsed.spec))
    draft.verdicts.extend((*priority_class.verdicts(parsed), *quota.verdicts(parsed)))
    if names.wait(parsed, draft):
        return _finish(parsed, draft, parsed.accepted, now)
    if parsed.plan_problem is not None and not quiet(observed):
        return _with_unreadable_plan(parsed, draft, parsed.plan_problem, now)
    if parsed.accepted is not None and (end := run.ending(parsed, now)):
        return _end(parsed, draft, end, now)
    if preempted.stops(parsed):
        preempted.stop_pods(parsed, draft, now)
        return _finish(parsed, draft, parsed.accepted, now)
    if priority_class.missing(parsed):
        priority_class.wait(parsed, draft)
        return _finish(parsed, draft, parsed.accepted, now)
    if needs_view(observed, parsed, now) and not make_plan.ready(parsed) and not gang.awaits_nodes(parsed):
        return _while_planning(parsed, draft, parsed.spec, config, now)
    if parsed.queued:
        return _in_queue(parsed, draft, parsed.spec, config, now)
    kueue.leave(parsed, draft)
    target, plan_only = _plan(parsed, draft, config, now)
    if parsed.spec.suspend:
        _suspend(parsed, draft, now)
    elif gang.stops(parsed):
        stop(parsed, draft, now)
    elif target is not None and not provisioning.hold(parsed, draft, parsed.spec, target, config, now):
        _roll(parsed, draft, parsed.spec, target, config, now)
        preempted.resumed(parsed, draft)
        lost = provisioning.gave_up(parsed, draft, now)
        if draft.plan is not None and not lost and not gang.admit(parsed, draft, now):
            gang.release(parsed, draft, now)
    accepted = parsed.accepted if parsed.accepted is not None and not quiet(observed) else target or parsed.accepted
    return _finish(parsed, draft, accepted, now, plan_only=plan_only)


def failed(observed: Observed, error: str, now: datetime) -> Desired:
    """Return the desired state of a job if the operator itself failed while handling it: only a condition about that.

    Pods and other objects do not change. ``error``: text of the error.
    """
    before = previous(observed.job)
    text = (
        f"the operator failed on this job and retries: {error:.1000}. Pods that run are left as they are. Please "
        "report this error with the operator's log and this manifest"
    )
    verdicts = [Verdict("Accepted", FALSE, "InternalError", text)]
    conditions = merge(before.conditions, verdicts, observed.job.generation, now)
    record = observed.plan_record or before.plan_record
    status = before.model_copy(update={"conditions": conditions, "phase": phase(conditions), "plan_record": record})
    return Desired(status=status, events=events(before.conditions, conditions))


def _plan(
    parsed: ParsedJob, draft: Draft, config: RenderConfig, now: datetime
) -> tuple[StoredPlan | None, PlanStatus | None]:
    """Return the plan that should run, and the plan that the status only shows (mode PlanOnly). Either may be None.

    The first is the current plan, or a new one if the job needs one or gains from one. Add the condition Planned.
    """
    assert parsed.spec is not None
    if priority_class.keeps_plan(parsed):
        return priority_class.kept(parsed, draft), None
    plan_only = parsed.spec.planning.mode is PlanningMode.PLAN_ONLY
    if plan_only:
        gang.plan_only(parsed, draft)
    wanted, again = make_plan.wants_plan(parsed), gang.waits(parsed)
    awaits = not wanted and not plan_only and gang.awaits_nodes(parsed)
    if parsed.accepted is not None and awaits and not provisioning.starts_earlier(parsed, config):
        waiting = provisioning.with_present_way(parsed.accepted, config)
        draft.verdicts.append(make_plan.planned(waiting))
        return waiting, None
    if not wanted and not again and not awaits:
        if parsed.accepted is None or plan_only:
            return parsed.accepted, None
        target = (
            more_memory.raise_memory(parsed, draft, config)
            or node_faults.move(parsed, draft, config)
            or resize.resize(parsed, draft, config, now)
            or replan.replan(parsed, draft, config, now)
        )
        moves = resize.undecided(parsed, now) or replan.undecided(parsed) or node_faults.undecided(parsed)
        again = moves and gang.lost(parsed, draft, make_plan.decided(parsed, config))
        if not again:
            stands = target is None or target.revision == parsed.accepted.revision
            found = make_plan.planned(target or parsed.accepted, started=stands and gang.started(parsed))
            draft.verdicts.append(found)
            return target, None
    if not wanted and (left_s := gang.back_off_left_s(parsed, now)) > 0:
        draft.requeue_in(left_s)
        return None, None
    decision = make_plan.decide(parsed, config)
    if isinstance(decision, Infeasible):
        draft.verdicts.append(make_plan.infeasible(decision, parsed))
        draft.requeue_in(make_plan.RETRY_S if decision.transient else 4 * make_plan.RETRY_S)
        if not plan_only:
            gang.no_plan(parsed.observed, draft, queue_text(place_of(parsed, now)))
            more_memory.start_without(parsed, draft, decision)
        return None if again else parsed.accepted, None
    decision = same_pods.with_running_requests(parsed, more_memory.replacing(parsed.accepted, decision))
    end_conditions_of_former_plan(parsed.before.conditions, draft, decision)
    draft.verdicts.append(make_plan.planned(decision, plan_only=plan_only))
    return (None, decision.status) if plan_only else (decision, None)


def _while_planning(parsed: ParsedJob, draft: Draft, spec: DLJobSpec, config: RenderConfig, now: datetime) -> Desired:
    """Return the desired state of a job while another task makes its new plan: its pods remain as they are.

    Only pods on lost nodes are replaced meanwhile. Pods that stop for another plan are not started again. The pods of a
    job that must have none stop at once.
    """
    observed, accepted = parsed.observed, parsed.accepted
    if gang.stops(parsed):
        stop(parsed, draft, now)
        return _finish(parsed, draft, accepted, now)
    runs = accepted is not None and any(item.replicas for item in observed.sets) and in_force(observed, accepted)
    if accepted is not None and runs and observed.lost_nodes:
        _roll(parsed, draft, spec, accepted, config, now)
        return _finish(parsed, draft, accepted, now)
    draft.wanted = sum(item.replicas for item in observed.sets)
    if accepted is not None and runs:
        draft.verdicts.append(run.running(parsed, accepted))
    return _finish(parsed, draft, accepted, now)


def _in_queue(parsed: ParsedJob, draft: Draft, spec: DLJobSpec, config: RenderConfig, now: datetime) -> Desired:
    """Return the desired state of a job in a queue of Kueue: its pods run while Kueue admits the job.

    If the spec suspends the job, its pods stop, and the job leaves the queue. dljob's start time-out and replanning do
    not apply to jobs that Kueue admits.
    """
    if spec.suspend:
        _suspend(parsed, draft, now)
        kueue.leave(parsed, draft)
        return _finish(parsed, draft, parsed.accepted, now)
    target = kueue.follow(parsed, draft, config, now)
    if target is not None:
        _roll(parsed, draft, spec, target, config, now)
        if draft.plan is not None:
            kueue.running(parsed, draft, now)
    return _finish(parsed, draft, target or parsed.accepted, now)


def _suspend(parsed: ParsedJob, draft: Draft, now: datetime) -> None:
    observed = parsed.observed
    stop(parsed, draft, now)
    draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "Suspended", "spec.suspend is true"))
    if quiet(observed):
        text = "spec.suspend is true, and all pods have stopped"
        draft.verdicts.append(Verdict("Suspended", TRUE, "Suspended", text))
    else:
        text = f"{len(observed.pods)} pods are writing a last checkpoint before they stop"
        draft.verdicts.append(Verdict("Suspended", FALSE, "Suspending", text))
    if parsed.accepted is not None:
        draft.verdicts.append(Verdict("Running", FALSE, "NotStarted", "the job is suspended"))


def _roll(
    parsed: ParsedJob, draft: Draft, spec: DLJobSpec, target: StoredPlan, config: RenderConfig, now: datetime
) -> None:
    """Start the pods of the plan ``target``. If pods of another plan still run, only stop those in this reconcile."""
    observed, current = parsed.observed, parsed.accepted
    target = (running := plan_edits.continued(parsed, target)) or target
    if find(parsed.before.conditions, "Suspended") is not None:
        draft.verdicts.append(Verdict("Suspended", FALSE, "NotSuspended", "spec.suspend is false"))
    changed = running is None and (current is None or current.revision != target.revision)
    stops = changed or not in_force(observed, target)
    if stops and not quiet(observed) and not same_pods.run_on(parsed, target, config):
        stop(parsed, draft, now)
        why = "the spec has changed" if current is None or target.replans == 0 else "another plan is better"
        if current is None and not observed.sets:
            why = "an earlier job of this name still has pods"
        if any((verdict.type, verdict.status) == (node_faults.CONDITION, TRUE) for verdict in draft.verdicts):
            why = "a node is faulty"
        elif any((verdict.type, verdict.reason) == (memory_kills.CONDITION, "Raising") for verdict in draft.verdicts):
            why = "pods reached their memory limit"
        elif resizing := next((v for v in draft.verdicts if (v.type, v.status) == (resize.CONDITION, TRUE)), None):
            others = "other jobs gain more from what this one releases"
            why = {"NodesGone": "pods find no node", "DevicesReassigned": others}.get(resizing.reason, why)
        text = f"{why}: {len(observed.pods)} pods write a checkpoint and stop before the new pods start"
        draft.verdicts.append(Verdict("Running", FALSE, "Replacing", text))
        return
    volume = volume_ready(observed, spec, target)
    draft.verdicts.append(volume)
    if blocks(volume) and quiet(observed):
        draft.verdicts.append(
            Verdict("Running", FALSE, "NotStarted", "a volume is not usable; see the condition VolumeReady")
        )
        draft.requeue_in(RECHECK_S)
        return
    target = fence(parsed, draft, failure_conditions.carried(parsed, target), now)
    bring_up(draft, observed, spec, target, config)
    draft.verdicts.append(silent_agent.explained(parsed, draft, run.running(parsed, target), target, now))
    if end := run.deadline(parsed, now):
        draft.requeue_in((end - now).total_seconds())


def _end(parsed: ParsedJob, draft: Draft, verdict: Verdict, now: datetime) -> Desired:
    """Return the desired state of a job that has just ended: without pods, with its outcome in the status.

    ``verdict``: the outcome, the condition Complete or Failed. A complete job also updates the profiles. That of a
    training script gets the memory of its pods in any case.
    """
    draft.verdicts.append(verdict)
    if parsed.spec is not None and parsed.report is not None and verdict.type == "Complete":
        draft.measurements = run.measurements(parsed.spec, parsed.report, parsed.accepted, parsed.observed)
    draft.memory = run.shown_memory(parsed, failed=verdict.type == "Failed")
    memory_kills.at_end(parsed, draft)
    return _finished(parsed, draft, now, just_now=True)


def _finished(parsed: ParsedJob, draft: Draft, now: datetime, *, just_now: bool = False) -> Desired:
    stop(parsed, draft, now, over=True)
    draft.verdicts.append(Verdict("Running", FALSE, "Finished", "the job has ended"))
    ended = now if just_now else min(parsed.before.completion_time or now, now)
    ttl_s = parsed.asked.run_policy.ttl_seconds_after_finished if parsed.asked else None
    if ttl_s is not None:
        left_s = (run.later(ended, ttl_s) - now).total_seconds()
        if left_s <= 0 and not just_now:
            return Desired(delete_job=True)
        draft.requeue_in(left_s)
    kueue.finish(parsed, draft, now)
    return _finish(parsed, draft, parsed.accepted, now)


def _looking(parsed: ParsedJob, looking: Looking, draft: Draft, config: RenderConfig, now: datetime) -> Desired:
    """Return the desired state of a job with ``spec.task`` that waits for the suggestion of its look pod.

    Pods of an earlier spec continue meanwhile.
    """
    draft.verdicts.append(Verdict("Accepted", TRUE, "Accepted", "the spec is valid"))
    if names.wait(parsed, draft):
        return _finish(parsed, draft, parsed.accepted, now)
    draft.verdicts.extend(priority_class.verdicts(parsed))
    look.look(parsed, looking, draft, config, now)
    if looking.spec.suspend:
        _suspend(parsed, draft, now)
        kueue.leave(parsed, draft)
        return _finish(parsed, draft, parsed.accepted, now)
    return _without_spec(parsed, draft, now)


def _without_spec(parsed: ParsedJob, draft: Draft, now: datetime) -> Desired:
    """Return the desired state of a job whose spec is invalid: pods that run continue if Kueue does not evict them.

    Pods on lost nodes are deleted, so that their StatefulSets replace them. If the run has ended, the job ends too.
    """
    if parsed.accepted is None:
        return _finish(parsed, draft, None, now)
    if end := run.ending(parsed, now):
        return _end(parsed, draft, end, now)
    if not kueue.held_without_spec(parsed, draft, now):
        fence_without_spec(parsed, draft, now)
        draft.wanted = sum(item.replicas for item in parsed.observed.sets)
        draft.verdicts.append(run.running(parsed, parsed.accepted))
    return _finish(parsed, draft, parsed.accepted, now)


def _with_unreadable_plan(parsed: ParsedJob, draft: Draft, problem: str, now: datetime) -> Desired:
    """Return the desired state of a job whose plan this release of the operator cannot read: its pods do not change.

    The pods train, and a restart would lose time. ``problem``: why the plan cannot be read.
    """
    text = (
        f"ConfigMap {Names.of(parsed.observed.job).plan}: found a plan that this release of the operator cannot read "
        f"({problem:.500}); the pods run on. Upgrade the operator, or delete the ConfigMap to plan the job again"
    )
    draft.wanted = sum(item.replicas for item in parsed.observed.sets)
    draft.verdicts.append(Verdict("Planned", FALSE, "PlanUnreadable", text))
    return _finish(parsed, draft, None, now)


def _finish(
    parsed: ParsedJob, draft: Draft, accepted: StoredPlan | None, now: datetime, *, plan_only: PlanStatus | None = None
) -> Desired:
    plan_edits.store(parsed, draft)
    if accepted is not None and not any(verdict.type == "PodsReady" for verdict in draft.verdicts):
        draft.verdicts.append(pods_ready(parsed.observed, draft.wanted, now))
        if (left_s := unscheduled_in_s(parsed.observed, now)) is not None:
            draft.requeue_in(left_s)
    draft.verdicts.extend(run.problem_conditions(parsed))
    provisioning.clean(parsed, draft)
    look.finish(parsed, draft)
    status = build(
        parsed.observed, parsed.before, draft.verdicts, accepted, parsed.report, now,
        wanted=draft.wanted, start_timeouts=draft.start_timeouts, preemptions=draft.preemptions, plan_only=plan_only,
        suggestion=parsed.shown_suggestion,
    )  # fmt: skip
    status = with_waited(parsed.before, status, now)
    status = with_deadline_risk(parsed, with_forecasts(parsed, status, now), now)
    status = with_usage(parsed, status, accepted, now)
    if (left_s := deadline_in_s(parsed, now)) is not None:
        draft.requeue_in(left_s)
    return Desired(
        objects=tuple(draft.objects),
        secret=draft.secret,
        scales=tuple(draft.scales),
        deletes=tuple(draft.deletes),
        status=status,
        events=(*events(parsed.before.conditions, status.conditions), *draft.events),
        requeue_after_s=min(draft.requeues_s, default=None),
        measurements=draft.measurements,
        memory=draft.memory,
        plan=draft.plan,
        workload=draft.workload,
    )
