"""Another plan for a job that runs, when what it measures contradicts the plan it has.

Told in the condition PlanContradicted, which also carries the state: SlowerThanPredicted (what the run measured is
taught to the profiles), then, with them, Replanning (a better plan was found; the pods checkpoint and leave) or
NoBetterPlan (asked once for each plan); Replanned when the new one is in force.
"""

from dataclasses import replace
from datetime import datetime

from dlcontract import Report, RunPhase
from dljob.api import Minimize, PlanningMode
from dljob.job.stored_plan import StoredPlan
from dljob.planner import Infeasible
from dljob.reconcile import planning, run
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.rollout import quiet
from dljob.reconcile.volume import blocks, volume_ready
from dljob.render import RenderConfig
from dljob.status import FALSE, TRUE, Verdict, find

CONDITION = "PlanContradicted"
MIN_STEPS = 100
"""A run is not judged by its first steps: caches are cold, and the trainer is still moving shares."""
LEARNING_S = 5.0
"""Between teaching the profiles and planning with them: they come back through the API server's watch."""
START_UP_S = 20.0
"""What a change of plan costs where the job's own start was not measured."""
MAX_REPLANS = 3
"""For one spec: predictions that fail so often will not hold the next time either."""


def undecided(known: ParsedJob) -> bool:
    """Whether a plan has to be looked for, which takes a view of the cluster."""
    found = find(known.before.conditions, CONDITION)
    return (
        found is not None
        and found.status is TRUE
        and found.reason in ("SlowerThanPredicted", "Replanning")
        and _may(known)
    )


def replan(known: ParsedJob, draft: Draft, config: RenderConfig, now: datetime) -> StoredPlan | None:
    """The plan to go on with: another one, or the accepted one. Verdicts and what is to be learned go to the draft."""
    accepted, report = known.accepted, known.report
    if accepted is None or report is None or not _may(known):
        return accepted
    found = find(known.before.conditions, CONDITION)
    reason = found.reason if found is not None and found.status is TRUE else None
    if reason == "Replanning":
        return _move(known, draft, config)
    text = _contradiction(known, accepted, report, now)
    if text is None:
        told = reason == "SlowerThanPredicted"  # NoBetterPlan stays: asked once for each plan
        if told and report.phase is RunPhase.RUNNING and report.plan_number == accepted.plan.number:
            draft.verdicts.append(Verdict(CONDITION, FALSE, "AsPredicted", "steps take what was predicted"))
        return accepted
    if reason is None:
        assert known.spec is not None
        learned = run.measurements(known.spec, report, accepted)
        # The noise scale grows during a training: half of one says too little, and the run will say it again.
        draft.measurements = learned and replace(learned, data=None)
        draft.verdicts.append(Verdict(CONDITION, TRUE, "SlowerThanPredicted", text))
        draft.requeue_in(LEARNING_S)
    elif reason == "SlowerThanPredicted":
        assert found is not None
        wait_s = LEARNING_S - (now - found.last_transition_time).total_seconds()
        if wait_s > 0 or known.observed.view is None:
            draft.requeue_in(max(wait_s, 0.0))
        else:
            draft.verdicts.append(_judged(known, accepted, report, config, text))
            draft.requeue_in(0.0)
    return accepted


def unjudged(known: ParsedJob, draft: Draft, new: StoredPlan) -> None:
    """A plan of another spec: what was said of the one before does not hold for it."""
    found = find(known.before.conditions, CONDITION)
    if found is not None and found.status is TRUE:
        text = f"plan {new.plan.number} was made for the spec as it is now"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Replanned", text))


def _may(known: ParsedJob) -> bool:
    """Plans of people's own stay; so do those made for energy or cost, of which a run measures nothing."""
    spec, accepted = known.spec, known.accepted
    return (
        spec is not None
        and accepted is not None
        and not spec.suspend
        and spec.planning.mode is PlanningMode.AUTO
        and spec.objective.minimize is Minimize.TIME
        and accepted.spec_digest == known.digest
        and accepted.replans < MAX_REPLANS
    )


def _contradiction(known: ParsedJob, accepted: StoredPlan, report: Report, now: datetime) -> str | None:
    """What a step takes and should take, where that is beyond the plan's interval."""
    launched = find(known.before.conditions, "Running")
    running_s = 0.0
    if launched is not None and launched.status is TRUE:
        running_s = (now - launched.last_transition_time).total_seconds()
    p90_s = accepted.plan.expected.step_p90_s
    if (
        report.phase is not RunPhase.RUNNING
        or report.plan_number != accepted.plan.number
        or report.mismatches
        or report.step < MIN_STEPS
        or report.step_s is None
        or not 0 < p90_s < report.step_s
        or running_s < MIN_STEPS * p90_s  # ranks that have just been launched again are cold, too
    ):
        return None
    return f"plan {accepted.plan.number}: steps take {report.step_s:.3g} s, predicted were at most {p90_s:.3g} s (p90)"


def _judged(known: ParsedJob, accepted: StoredPlan, report: Report, config: RenderConfig, text: str) -> Verdict:
    """Whether the rest of the training would be done sooner by another plan, its switching cost included."""
    assert report.step_s is not None
    other = _other(known, accepted, config)
    if isinstance(other, str):
        return Verdict(CONDITION, TRUE, "NoBetterPlan", f"{text}; {other}")
    left, startup = max(0, report.steps - report.step), known.before.startup
    switch_s = (startup.total_seconds if startup else None) or START_UP_S
    again = left if accepted.plan.checkpoint.enabled else report.steps  # without checkpoints from the beginning
    stay_s, move_s = left * report.step_s, again * other.plan.expected.step_p90_s + switch_s
    both = (
        f"the {left} steps left take {stay_s:.3g} s as it is, "
        f"{move_s:.3g} s by {other.status.summary}, restart included"
    )
    if move_s >= stay_s:
        return Verdict(CONDITION, TRUE, "NoBetterPlan", f"{text}; {both}")
    return Verdict(CONDITION, TRUE, "Replanning", f"{text}; {both}")


def _other(known: ParsedJob, accepted: StoredPlan, config: RenderConfig) -> StoredPlan | str:
    """The best plan by what is known now, or why it is none."""
    found = planning.decide(known, config)
    if isinstance(found, Infeasible):
        whole = " with the whole model on each rank" if accepted.plan.splits_model else ""
        return f"no plan is possible now{whole}: {found.message}"
    if _layout(found) == _layout(accepted):
        return "with what was measured it is still the best plan"
    assert known.spec is not None
    volume = volume_ready(known.observed, known.spec, found)
    if blocks(volume):
        return f"{found.status.summary} would be better, but {volume.message}"
    replans = accepted.replans + 1
    return found.model_copy(update={"replans": replans})


def _layout(accepted: StoredPlan) -> object:
    """What only a restart changes for the better: the trainer itself moves shares and, where it measures them, chooses
    among collectives; other requests of CPU make no step faster.
    """
    plan, places = accepted.plan, [group.model_copy(update={"cpu_m": 1}) for group in accepted.groups]
    return places, plan.parallelism, plan.micro_batches, "measured" if plan.measure_collective else plan.collective


def _move(known: ParsedJob, draft: Draft, config: RenderConfig) -> StoredPlan | None:
    accepted = known.accepted
    if accepted is None or known.observed.view is None:
        return accepted
    other = _other(known, accepted, config)
    if isinstance(other, str):
        draft.verdicts.append(Verdict(CONDITION, TRUE, "NoBetterPlan", other))
        return accepted
    if quiet(known.observed):
        text = f"plan {other.plan.number} replaces plan {accepted.plan.number}: {other.status.summary}"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Replanned", text))
    return other
