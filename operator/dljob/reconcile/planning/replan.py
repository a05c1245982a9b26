"""Replan a running job whose measurements contradict its plan.

The reason of the condition PlanContradicted stores the state of this process:

- SlowerThanPredicted: the measurements update the profiles, and the operator will plan once more with these profiles.
- Replanning: the operator found a better plan, and the pods of the old plan write a checkpoint and stop. If no plan is
  possible any more after that, because other jobs have taken the devices, the job waits without pods.
- NoBetterPlan: the operator found no better plan.
- Replanned: the new plan has replaced the old one.
- AsPredicted: a later measurement agreed with the plan.
"""

from dataclasses import replace
from datetime import datetime

from dlcontract import Report, RunPhase
from dljob.api import Minimize
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import start_s
from dljob.planner import Infeasible
from dljob.planner.types.texts import duration
from dljob.reconcile import run
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import make_plan
from dljob.reconcile.planning.rest import START_UP_S, judge
from dljob.reconcile.rollout import quiet
from dljob.reconcile.volume import blocked, blocks, volume_ready
from dljob.render import RenderConfig
from dljob.status import FALSE, TRUE, Verdict, find

CONDITION = "PlanContradicted"
MIN_STEPS = 100
"""Number of steps before a measured step time can contradict the plan.

The first steps are not representative, because caches are cold and the trainer is still adapting local batch sizes.
"""
LEARNING_S = 5.0
"""Seconds between updating the profiles and planning with them.

The operator plans with cached profiles, and a watch of the API server must first bring the updates into the cache.
"""
MAX_REPLANS = 3
"""Maximum number of replans for one spec. After that many wrong predictions, another one is unlikely to be better."""


def undecided(parsed: ParsedJob) -> bool:
    """Return True if the operator must search for a better plan for a running job, or is replacing its plan by one.

    That is so if measurements have contradicted the plan (PlanContradicted is True), and the job may be replanned.
    """
    found = find(parsed.before.conditions, CONDITION)
    return (
        found is not None
        and found.status is TRUE
        and found.reason in ("SlowerThanPredicted", "Replanning")
        and _may(parsed)
    )


def replan(parsed: ParsedJob, draft: Draft, config: RenderConfig, now: datetime) -> StoredPlan | None:
    """Return the plan with which the job should continue: its current plan or a better one. None: it has no plan.

    Add the condition PlanContradicted to the draft if it changes. When the plan is first contradicted, also add the
    measurements with which the operator updates the profiles. The observed structure of a script and its memory are
    added as well.
    """
    accepted, report = parsed.accepted, parsed.report
    draft.measurements = draft.measurements or run.shown_structure(parsed)
    draft.memory = run.shown_memory(parsed)
    if accepted is None or report is None or not _may(parsed):
        return accepted
    found = find(parsed.before.conditions, CONDITION)
    reason = found.reason if found is not None and found.status is TRUE else None
    if reason == "Replanning":
        return _move(parsed, draft, config)
    text = _contradiction(parsed, accepted, report, now)
    if text is None:
        was_slower = reason == "SlowerThanPredicted"  # NoBetterPlan does not change: one search per plan.
        if was_slower and report.phase is RunPhase.RUNNING and report.plan_number == accepted.plan.number:
            draft.verdicts.append(Verdict(CONDITION, FALSE, "AsPredicted", "the step time is within the prediction"))
        return accepted
    if reason is None:
        assert parsed.spec is not None
        learned = run.measurements(parsed.spec, report, accepted, parsed.observed)
        # ``data=None`` leaves the noise scale out of the profile. It grows during training, and the report at the end
        # of the run contains the noise scale of all steps.
        draft.measurements = learned and replace(learned, data=None)
        draft.verdicts.append(Verdict(CONDITION, TRUE, "SlowerThanPredicted", text))
        draft.requeue_in(LEARNING_S)
    elif reason == "SlowerThanPredicted":
        assert found is not None
        wait_s = LEARNING_S - (now - found.last_transition_time).total_seconds()
        if wait_s > 0 or not make_plan.ready(parsed):
            draft.requeue_in(max(wait_s, 0.0))
        else:
            draft.verdicts.append(_judged(parsed, accepted, report, config, text, now))
            draft.requeue_in(0.0)
    return accepted


def _may(parsed: ParsedJob) -> bool:
    """Return True if the job may be replanned. Plans that the user fixed are never replaced."""
    accepted = parsed.accepted
    if accepted is None or not parsed.plan_may_change:
        return False
    return accepted.replans - (accepted.resizes or 0) < MAX_REPLANS


def _contradiction(parsed: ParsedJob, accepted: StoredPlan, report: Report, now: datetime) -> str | None:
    """Return a text that says how measurements contradict the plan; None if they do not, or if there are too few.

    A measured step time contradicts the plan if it exceeds the predicted 90th percentile (p90).
    """
    launched = find(parsed.before.conditions, "Running")
    running_s = 0.0
    if launched is not None and launched.status is TRUE:
        running_s = (now - launched.last_transition_time).total_seconds()
    p90_s = accepted.plan.expected.step_p90_s
    if (
        report.phase is not RunPhase.RUNNING
        or report.plan_number != accepted.plan.number
        or report.mismatches
        or not accepted.plan.model.resumes
        or report.step < MIN_STEPS
        or report.step_s is None
        or not 0 < p90_s < report.step_s
        or running_s < MIN_STEPS * p90_s  # Caches are also cold after a restart.
    ):
        return None
    return (
        f"plan {accepted.plan.number}: found a step time of {duration(report.step_s)}; expected {duration(p90_s)} (p90)"
    )


def _judged(
    parsed: ParsedJob, accepted: StoredPlan, report: Report, config: RenderConfig, text: str, now: datetime
) -> Verdict:
    """Return the condition PlanContradicted after a search for a better plan.

    Another plan is better if it finishes the training sooner, including the time for the change of plan. If the job
    minimizes energy or cost, ``rest.judge`` says whether it is better. ``text`` describes the contradiction and becomes
    part of the message.
    """
    assert report.step_s is not None and parsed.spec is not None
    other = _other(parsed, accepted, config)
    if isinstance(other, str):
        return Verdict(CONDITION, TRUE, "NoBetterPlan", f"{text}; {other}")
    if parsed.spec.objective.minimize is not Minimize.TIME:
        why, figures = judge(parsed, other, now)
        return Verdict(
            CONDITION, TRUE, "Replanning" if why else "NoBetterPlan", f"{text}; {other.status.summary}: {figures}"
        )
    left, switch_s = max(0, report.steps - report.step), start_s(parsed.before) or START_UP_S
    again = left if accepted.plan.checkpoint.enabled else report.steps  # Without checkpoints, step 0 follows.
    stay_s = left * accepted.status.predicted.per_step_s(report.step_s, report.steps)
    move_s = again * other.status.predicted.per_step_s(other.plan.expected.step_p90_s, report.steps) + switch_s
    both = (
        f"the remaining {left} steps take {duration(stay_s)} with this plan, "
        f"{duration(move_s)} with {other.status.summary}, including the restart"
    )
    if move_s >= stay_s:
        return Verdict(CONDITION, TRUE, "NoBetterPlan", f"{text}; {both}")
    return Verdict(CONDITION, TRUE, "Replanning", f"{text}; {both}")


def _other(parsed: ParsedJob, accepted: StoredPlan, config: RenderConfig) -> StoredPlan | str:
    """Return the best plan according to the current profiles, or the reason why no plan is better than ``accepted``."""
    found, stopped = make_plan.decide(parsed, config), quiet(parsed.observed)
    if isinstance(found, Infeasible):
        whole = " without model parallelism" if accepted.plan.splits_model else ""
        return f"no plan is possible now{whole}: {found.field}: {found.message}"
    if found.new_nodes and not stopped:
        return "no plan is possible on the existing nodes"
    if layout(found) == layout(accepted) and not found.new_nodes:
        only = "".join(f"; {text}" for text in parsed.limits)
        return f"plan {accepted.plan.number} is still the best plan, also with the new measurements{only}"
    assert parsed.spec is not None
    volume = volume_ready(parsed.observed, parsed.spec, found)
    if blocks(volume) and not stopped:  # Pods that have stopped start only on devices that are free now.
        return f"{found.status.summary} would be better, but {volume.message}"
    replans = accepted.replans + 1
    return found.model_copy(update={"replans": replans, "resizes": accepted.resizes})


def layout(accepted: StoredPlan) -> object:
    """Return the parts of a plan that can be improved only by a restart, as a value for comparing two plans.

    A running job adapts its local batch sizes itself, and it chooses its collective itself if the plan lets ranks
    measure collectives. Of the CPU requests, only the number of threads makes a difference, which is the number of
    whole CPUs of each rank.
    """
    plan = accepted.plan
    places = [replace(group, cpu_m=max(1, group.cores)) for group in accepted.groups]
    return (
        places,
        plan.parallelism,
        plan.micro_batches,
        plan.replicas,
        plan.precision,
        plan.activation_checkpointing,
        "measured" if plan.measure_collective else plan.collective,
    )


def _move(parsed: ParsedJob, draft: Draft, config: RenderConfig) -> StoredPlan | None:
    accepted = parsed.accepted
    if accepted is None or not make_plan.ready(parsed):
        return accepted
    other = _other(parsed, accepted, config)
    if isinstance(other, str):
        draft.verdicts.append(Verdict(CONDITION, TRUE, "NoBetterPlan", other))
        return accepted
    assert parsed.spec is not None
    # The move is not over while a volume is not usable: the job is planned again for the devices that are free then.
    if quiet(parsed.observed) and not blocked(parsed.observed, parsed.spec, other):
        text = f"plan {other.plan.number} replaces plan {accepted.plan.number}: {other.status.summary}"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Replanned", text))
    return other
