"""Jobs in a queue of Kueue: they have no pods until Kueue has admitted their Workload, and stop when it evicts them.

The plan is made while the job waits, as if all nodes were free, and stored without pods. Its Workload asks for what the
plan needs. If Kueue admits fewer pods, the job is planned again for exactly these pods. The stored plan then contains
the admission (``StoredPlan.admission``), so that an operator that starts later need not derive it again.
"""

from datetime import datetime

from dljob import kueue
from dljob.api import DLJobSpec
from dljob.job.plan.stored import StoredPlan
from dljob.kueue import Problem, Stage, Turn
from dljob.planner import Infeasible
from dljob.reconcile import gang
from dljob.reconcile.admission import unusable
from dljob.reconcile.desired import Draft, WorkloadChange
from dljob.reconcile.failures.fence import stop
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import make_plan
from dljob.reconcile.rollout import quiet
from dljob.reconcile.volume import blocks, volume_ready
from dljob.render import RenderConfig, support
from dljob.status import FALSE, TRUE, Verdict, is_true, pods_ready

RECHECK_S = 15.0
"""Seconds until the next reconcile of a job that waits for an object that the operator does not watch."""


def wants_plan(parsed: ParsedJob, now: datetime | None = None) -> bool:
    """Return True if a job in a queue of Kueue must be planned.

    That is so if it has no plan for its spec, if it needs a new Workload (the object that asks Kueue for quota), or if
    Kueue admitted fewer pods than the plan has. ``now``: present time; None: ignore the back-off after an admission
    that the job could not use.
    """
    spec, observed, accepted = parsed.spec, parsed.observed, parsed.accepted
    stopped = quiet(observed)
    if spec is None or parsed.finished or spec.suspend or not observed.queue.api_version:
        return False
    if parsed.plan_problem is not None and not stopped:
        return False
    if observed.lacks_priority_class and any(item.replicas for item in observed.sets):
        return False  # Its pods run on, because those of another plan could not start.
    if accepted is None or accepted.spec_digest != parsed.digest:
        return True
    if now is not None and unusable.backs_off(parsed, now):
        return False
    # A new Workload must not ask for the pods that an earlier one was admitted with.
    anew = accepted.admission is not None and observed.queue.workload is None
    return stopped and (anew or unusable.plans_anew(parsed) or parsed.within is not None)


def follow(parsed: ParsedJob, draft: Draft, config: RenderConfig, now: datetime) -> StoredPlan | None:
    """Make the next step of a job in a queue of Kueue. Return the plan whose pods should run; None: no pods.

    The steps are: make the plan, ask for quota with a Workload, wait, start the admitted pods, and stop evicted ones.
    Add the changes of objects and the conditions to the draft.
    """
    spec, observed, accepted = parsed.spec, parsed.observed, parsed.accepted
    assert spec is not None
    turn, stopped = kueue.turn(observed.queue), quiet(observed)
    if turn.stage is Stage.NO_KUEUE:
        return _without_kueue(parsed, draft, turn, now)
    if stopped and unusable.backs_off(parsed, now):
        left_s = unusable.back_off_left_s(parsed, now)
        draft.requeue_in(left_s if left_s > 0 else RECHECK_S)  # Else, the Workload is still being deleted.
        _hold_as_before(parsed, draft, now)
        return None
    planned, anew = accepted, wants_plan(parsed, now)
    if anew:
        decision = make_plan.decide(parsed, config)
        if isinstance(decision, Infeasible):
            return _infeasible(parsed, draft, decision, turn, now)
        planned = decision
    assert planned is not None
    draft.verdicts.append(make_plan.planned(planned))
    if not stopped:
        if turn.stage is Stage.ADMITTED and not anew:
            return accepted
        _hold(parsed, draft, Turn(turn.stage, "the spec has changed") if anew else turn, now)
        return None
    if anew and parsed.within is None:
        draft.objects.extend(support(observed.job, spec, planned, config))
        _ask(parsed, draft, spec, planned, config, turn, now)
        return None
    if _out_of_date(parsed, planned, turn):
        _ask(parsed, draft, spec, planned, config, turn, now)
        return None
    if turn.stage is Stage.ADMITTED:
        return _start(parsed, draft, planned, now)
    if turn.stage is Stage.EVICTED:
        draft.workload = _status(parsed, "released", now)
    elif turn.stage is Stage.WAITING:
        _move(parsed, draft)
    if unusable.deactivated(parsed, turn) is not None:
        _hold_as_before(parsed, draft, now)
    else:
        _hold(parsed, draft, turn, now)
    return None


def _without_kueue(parsed: ParsedJob, draft: Draft, turn: Turn, now: datetime) -> StoredPlan | None:
    """Return the plan of a job with pods while Kueue is not available: pods that it admitted earlier continue to run.

    A job without pods waits. The result is then None, and the draft says why the job waits. ``turn``: state of the job
    in Kueue, and a message about it.
    """
    if parsed.accepted is not None and not quiet(parsed.observed):
        return parsed.accepted
    draft.requeue_in(RECHECK_S)
    _hold(parsed, draft, turn, now)
    return None


def _infeasible(parsed: ParsedJob, draft: Draft, found: Infeasible, turn: Turn, now: datetime) -> StoredPlan | None:
    """Handle a job for which no plan is possible. Return the plan whose pods should run; None: no pods.

    Pods of the job's last plan continue to run while Kueue admits them. If the job has no pods, delete its Workload, so
    that the job holds no quota. If Kueue admitted too few pods for a plan, ``unusable`` decides what becomes of the
    admission. ``found``: reason why no plan is possible. ``turn``: state of the job in Kueue, and a message about it.
    """
    observed, workload = parsed.observed, parsed.observed.queue.workload
    draft.verdicts.append(make_plan.infeasible(found, parsed))
    draft.requeue_in(make_plan.RETRY_S if found.transient else 4 * make_plan.RETRY_S)
    if not quiet(observed):
        if turn.stage is Stage.ADMITTED:
            return parsed.accepted
        _hold(parsed, draft, turn, now)
        return None
    if workload is not None and parsed.within is not None:
        unusable.respond(parsed, draft, found, now)
    else:
        text = "no plan is possible now; see the condition Planned"
        draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "NoPlan", text))
        if workload is not None and not workload.deleting:
            draft.workload = WorkloadChange(workload.name, workload.uid, delete=True)
    _suspended(parsed, draft, now)
    return None


def _out_of_date(parsed: ParsedJob, planned: StoredPlan, turn: Turn) -> bool:
    workload = parsed.observed.queue.workload
    return turn.stage in (Stage.ABSENT, Stage.OVER) or workload is None or workload.digest != planned.spec_digest


def _ask(
    parsed: ParsedJob,
    draft: Draft,
    spec: DLJobSpec,
    planned: StoredPlan,
    config: RenderConfig,
    turn: Turn,
    now: datetime,
) -> None:
    """Ask Kueue for quota: create or update the Workload for the plan ``planned``. The job then waits without pods.

    If the Workload has reserved quota or is finished, nobody can change it. It is then deleted now and created in a
    later reconcile. Do not ask as long as a volume is not usable or the priority class does not exist. ``turn``: state
    of the job in Kueue, and a message about it.
    """
    observed, workload = parsed.observed, parsed.observed.queue.workload
    volume = volume_ready(observed, spec, planned)
    draft.verdicts.append(volume)
    if blocks(volume):
        draft.requeue_in(RECHECK_S)
        text = "a volume is not usable, so the job does not ask for quota yet; see the condition VolumeReady"
        _hold(parsed, draft, Turn(turn.stage, text), now)
        return
    if workload is not None and workload.deleting:
        _hold(parsed, draft, turn, now)
        return
    if workload is not None and (turn.reserved or turn.stage is Stage.OVER):
        draft.workload = WorkloadChange(workload.name, workload.uid, delete=True)
        _hold(parsed, draft, Turn(Stage.WAITING, "the spec has changed, so the job asks for quota again"), now)
        return
    if (wanted := kueue.manifest.priority_class(observed.job, spec)) and observed.queue.priority is None:
        kind, name = wanted
        draft.requeue_in(RECHECK_S)
        text = f"found no {kind} {name!r}, which the job names; expected an existing {kind}. Create it, or name another"
        draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "PriorityClassNotFound", text))
        _suspended(parsed, draft, now)
        return
    manifest = kueue.workload(observed.job, spec, planned, config, observed.queue)
    draft.workload = WorkloadChange(manifest["metadata"]["name"], workload.uid if workload else "", apply=manifest)
    _hold(
        parsed,
        draft,
        Turn(Stage.WAITING, f"the job asks LocalQueue {observed.job.queue} for {planned.nodes} pods"),
        now,
    )


def _move(parsed: ParsedJob, draft: Draft) -> None:
    """Write the LocalQueue that the job's label names into its Workload.

    Kueue refuses this while the Workload has reserved quota.
    """
    workload, wanted = parsed.observed.queue.workload, parsed.observed.job.queue
    if workload is not None and wanted and workload.queue != wanted:
        change = {"queueName": wanted}
        draft.workload = WorkloadChange(workload.name, workload.uid, workload.version, spec=change)


def _start(parsed: ParsedJob, draft: Draft, planned: StoredPlan, now: datetime) -> StoredPlan | None:
    found = kueue.admitted(parsed.observed.queue)
    problem = found.problem
    if problem is None and any(found.counts.get(group.name) != group.nodes for group in planned.groups):
        text = (
            "Kueue admitted other numbers of pods than the plan has. To queue the job again, set spec.active of the "
            "Workload to false, and then to true"
        )
        problem = Problem("AdmissionNotUsable", text)
    if problem is None and parsed.within is not None and (more := _needs_more(parsed, planned)):
        problem = Problem("AdmissionNotUsable", more)
    if problem is not None:
        draft.requeue_in(RECHECK_S)
        draft.verdicts.append(Verdict(gang.CONDITION, FALSE, *problem))
        _suspended(parsed, draft, now)
        if parsed.within is not None:
            workload = parsed.observed.queue.workload
            assert workload is not None
            draft.workload = WorkloadChange(workload.name, workload.uid, workload.version, spec={"active": False})
        return None
    if planned.admission == found.admission:
        return planned
    update: dict[str, object] = {"admission": found.admission}
    if parsed.within is not None and parsed.accepted is not None:  # Its pods request what they asked Kueue for.
        asked = parsed.accepted
        update |= {"cpu_m": asked.cpu_m, "least_nodes": asked.least_nodes}
        update |= {"memory_nbytes": asked.memory_nbytes, "memory_by_group": asked.memory_by_group}
    return planned.model_copy(update=update)


def _needs_more(parsed: ParsedJob, planned: StoredPlan) -> str | None:
    """Return a text that says that the pods of ``planned`` need more memory than Kueue admitted; None if they do not.

    ``planned``: the plan for the pods that Kueue admitted, which are fewer than the job asked for. With fewer pods,
    each may need more memory than the pods of the stored plan, for which the job asked for quota. If the spec sets the
    memory request of the pods, all plans have the same request, and the result is None.
    """
    asked = parsed.accepted
    assert asked is not None and parsed.spec is not None
    more = [each for each in planned.groups if each.memory_nbytes > asked.memory_of(each.name)]
    if parsed.spec.resources.memory or not more:
        return None
    return (
        f"the plan for {planned.nodes} nodes needs {more[0].memory_nbytes} bytes of memory per pod; expected at most "
        f"{asked.memory_of(more[0].name)} bytes, which Kueue has admitted. Raise spec.nodes.min, or set "
        "spec.resources.memory"
    )


def _hold(parsed: ParsedJob, draft: Draft, turn: Turn, now: datetime) -> None:
    """Let the job wait without pods. If it has pods, they write a checkpoint and stop, as if the job were suspended.

    ``turn``: the state of the job in Kueue and a message about it, which become the condition Admitted.
    """
    draft.verdicts.append(Verdict(gang.CONDITION, FALSE, turn.stage.value, turn.message))
    _suspended(parsed, draft, now)


def _hold_as_before(parsed: ParsedJob, draft: Draft, now: datetime) -> None:
    """Let the job wait without pods, with the condition Admitted that it had before this reconcile."""
    if (verdict := unusable.before(parsed)) is not None:
        draft.verdicts.append(verdict)
    _suspended(parsed, draft, now)


def _suspended(parsed: ParsedJob, draft: Draft, now: datetime) -> None:
    stop(parsed, draft, now)
    if quiet(parsed.observed):
        text = "the job waits in a queue of Kueue; see the condition Admitted"
        draft.verdicts.append(Verdict("Suspended", TRUE, "InQueue", text))
    else:
        text = f"{len(parsed.observed.pods)} pods are writing a last checkpoint before they stop"
        draft.verdicts.append(Verdict("Suspended", FALSE, "Suspending", text))
    if parsed.accepted is not None:
        draft.verdicts.append(
            Verdict("Running", FALSE, "NotStarted", "the job waits for Kueue; see the condition Admitted")
        )


def running(parsed: ParsedJob, draft: Draft, now: datetime) -> None:
    """Add the condition Admitted=True of a job whose pods should run now, and tell Kueue whether they are ready."""
    ready = pods_ready(parsed.observed, draft.wanted, now)
    if ready.status is TRUE:
        draft.start_timeouts = 0
    where = kueue.turn(parsed.observed.queue)
    text = where.message if where.stage is Stage.ADMITTED else "Kueue admitted the job earlier"
    draft.verdicts.append(Verdict(gang.CONDITION, TRUE, Stage.ADMITTED.value, f"{text}; {ready.message}"))
    if where.stage is Stage.ADMITTED:
        draft.workload = _status(parsed, "ready" if ready.status is TRUE else "unready", now)


def held_without_spec(parsed: ParsedJob, draft: Draft, now: datetime) -> bool:
    """Stop the pods of a job without a valid spec if Kueue no longer admits them. Return True if it does not.

    Other jobs have the quota then. ``follow`` does the same for a job with a valid spec.
    """
    if parsed.accepted is None or parsed.accepted.admission is None:
        return False
    turn = kueue.turn(parsed.observed.queue)
    if turn.stage not in (Stage.EVICTED, Stage.INACTIVE):
        return False
    if turn.stage is Stage.EVICTED and quiet(parsed.observed):
        draft.workload = _status(parsed, "released", now)
    _hold(parsed, draft, turn, now)
    return True


def leave(parsed: ParsedJob, draft: Draft) -> None:
    """Delete the Workload of a job that is no longer in a queue and whose pods have stopped, which frees its quota."""
    workload = parsed.observed.queue.workload
    if workload is not None and not workload.deleting and quiet(parsed.observed):
        draft.workload = WorkloadChange(workload.name, workload.uid, delete=True)


def finish(parsed: ParsedJob, draft: Draft, now: datetime) -> None:
    """Tell Kueue that the job is over, as soon as its pods have stopped."""
    if parsed.finished and quiet(parsed.observed):
        draft.workload = _status(parsed, "finished", now)


def _status(parsed: ParsedJob, what: str, now: datetime) -> WorkloadChange | None:
    found, conditions = parsed.observed.queue.workload, parsed.before.conditions
    if found is None or found.deleting:
        return None
    if what == "released":
        patch: kueue.answers.Patch | None = kueue.released(found, now)
    elif what == "finished":
        success = is_true(conditions, "Complete")
        ended = next((c for c in conditions if c.type in ("Complete", "Failed") and c.status is TRUE), None)
        patch = kueue.finished(found, success=success, message=ended.message if ended else "", now=now)
    else:
        patch = kueue.pods_ready(found, ready=what == "ready", now=now)
    return None if patch is None else WorkloadChange(found.name, found.uid, found.version, status=patch)
