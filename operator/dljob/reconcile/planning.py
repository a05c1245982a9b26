"""From spec and cluster to an accepted plan, or to the reason why there is none."""

from dataclasses import replace
from math import ceil

from dlcontract import Plan
from dljob.api import ParallelismStrategy, PlanningMode
from dljob.cluster import ClusterView
from dljob.job.plan_status import plan_status
from dljob.job.question import planner_request
from dljob.job.stored_plan import StoredGroup, StoredPlan
from dljob.job.trainer_plan import trainer_plan
from dljob.planner import Decision, Group, Infeasible, RunningBatch
from dljob.planner.plan import plan
from dljob.reconcile.parsed import ParsedJob
from dljob.render import Names, RenderConfig
from dljob.status import FALSE, TRUE, Verdict

MAX_SET_NAME = 52
"""A StatefulSet's pods carry its name and a hash of 11 characters in a label of at most 63."""
RETRY_S = 15.0
"""How soon a plan that was not possible is tried again; changes of nodes come as events besides."""


PARTS_WERE_SLOW = "this job's steps in parts of the model took longer than predicted"


def wants_plan(known: ParsedJob) -> bool:
    """Whether the spec asks for a plan that is not there."""
    spec = known.spec
    if spec is None or known.finished or spec.suspend:
        return False
    if spec.planning.mode is PlanningMode.PLAN_ONLY:
        return not _shown(known)
    return known.accepted is None or known.accepted.spec_digest != known.digest


def _shown(known: ParsedJob) -> bool:
    """Whether the status shows the plan that PlanOnly asks for, of just this spec."""
    return any(
        c.type == "Planned" and c.status is TRUE and c.observed_generation == known.observed.job.generation
        for c in known.before.conditions
    )


def decide(known: ParsedJob, config: RenderConfig) -> StoredPlan | Infeasible:
    """A plan for the spec on the cluster as it is; the one in force where it would be the same but for its number."""
    job, spec, view = known.observed.job, known.spec, known.observed.view
    assert spec is not None and view is not None and known.digest is not None
    asked, whole = planner_request(job.name, spec, _begun_with(known)), _parts_were_slow(known)
    decision = plan(replace(asked, no_split_reason=PARTS_WERE_SLOW) if whole else asked, view, known.observed.learned)
    if isinstance(decision, Infeasible):
        return decision
    decision = _fitting(job.name, decision)
    current = known.accepted
    shown = known.before.plan if current is None and known.observed.sets else None
    last = current.plan.number if current else shown.number if shown else 0
    # The plan's ConfigMap may have been deleted after a fence; the last coordinator's report still has the term.
    term = current.plan.term if current else known.report.term if known.report else 1
    service = Names.of(job).service
    proposed = trainer_plan(
        job.name, job.namespace, job.uid, spec, decision, last + 1, term, service, config.cluster_domain
    )
    if current is not None and (contradicted := _by_checkpoint(known, current.plan, proposed)):
        return contradicted
    if current is not None and current.plan.digest() == proposed.digest():
        proposed = current.plan
    elif shown is not None and shown.digest == proposed.digest():  # its ConfigMap was deleted; all else stands
        proposed = proposed.model_copy(update={"number": shown.number})
    prediction = decision.chosen.prediction
    return StoredPlan(
        plan=proposed,
        status=plan_status(spec, decision, proposed.number, proposed.digest()),
        groups=tuple(_group(group, view) for group in decision.chosen.groups),
        memory_nbytes=prediction.host_memory_nbytes or max(2**29, prediction.memory_nbytes + 2**28),
        spec_digest=known.digest,
        splitting_disabled=whole,
        warning=decision.warning,
    )


def _parts_were_slow(known: ParsedJob) -> bool:
    """Whether a plan of strategy Auto with parts of the model has taken longer than predicted, under this spec.

    Only a contradicted plan is made anew for the same spec. What its steps took taught no profile, since they were of
    parts; so the planner would find the same plan again, or one much like it. Of whole models profiles know more.
    """
    spec, current = known.spec, known.accepted
    if spec is None or current is None or spec.parallelism.strategy is not ParallelismStrategy.AUTO:
        return False
    return current.spec_digest == known.digest and (current.splitting_disabled or current.plan.splits_model)


def _begun_with(known: ParsedJob) -> RunningBatch | None:
    """The batch that a job with batchSizeRange began with, which its checkpoints are of; None while it has none.

    An edit before the first checkpoint chooses anew, and so does a range that does not contain that batch any more:
    then ``_by_checkpoint`` has the last word.
    """
    spec, current = known.spec, known.accepted
    assert spec is not None
    bounds = spec.batch_size_range
    saved = known.before.last_checkpoint is not None and spec.checkpoint.enabled
    if bounds is None or not (saved or (current is not None and current.spec_digest == known.digest)):
        return None
    shown = current.status if current is not None else known.before.plan
    if shown is None:
        return None
    # A status alone does not say whether ranks split the model, and each share was the whole batch.
    batch = (
        current.plan.global_batch
        if current is not None
        else sum(share for group in shown.groups for share in group.batch_per_rank)
    )
    choice = shown.batch_choice  # None: the range is new
    least = bounds.min or spec.global_batch_size
    return RunningBatch(batch, choice.noise_scale if choice else None) if least <= batch <= bounds.max else None


def _by_checkpoint(known: ParsedJob, current: Plan, proposed: Plan) -> Infeasible | None:
    """Why training cannot go on by the proposed plan from the checkpoint that there is.

    The trainer would refuse it, and the job fail for good; so the plan in force stays, and the job goes on.
    """
    saved = known.before.last_checkpoint
    if saved is None or not (current.checkpoint.enabled and proposed.checkpoint.enabled):
        return None
    assert known.spec is not None
    begun = known.accepted.status.batch_choice if known.accepted else None
    open_ = begun is not None or known.spec.batch_size_range is not None
    for field, was, wanted in (
        (f"spec.{'batchSizeRange' if open_ else 'globalBatchSize'}", current.global_batch, proposed.global_batch),
        ("spec.seed", current.seed, proposed.seed),
        ("spec.model.name", current.model.name, proposed.model.name),
    ):
        if was != wanted:
            text = (
                f"found {wanted}, expected {was}, as in the job's checkpoint of step {saved.step}: set it back, or "
                "delete the job and create it anew, to train from the beginning"
            )
            return Infeasible("CheckpointContradicted", field, text)
    return None


def _group(group: Group, view: ClusterView) -> StoredGroup:
    """CPU to request: what the plan needs, but at most half of what is free, so that it fits where it was made for."""
    free = sorted((node.free_cpu for node in view.nodes if node.device == group.device), reverse=True)[: group.nodes]
    half_m = int(500 * min(free, default=0.0))
    needed_m = ceil(100 * group.cpu_per_pod) * 10
    return StoredGroup(
        name=group.name,
        device=group.device,
        is_gpu=group.is_gpu,
        nodes=group.nodes,
        ranks_per_node=group.ranks_per_node,
        cpu_m=max(50, min(needed_m, half_m // 10 * 10)),
    )


def _fitting(job: str, decision: Decision) -> Decision:
    """The decision with group names short enough for the names of this job's StatefulSets."""
    room = MAX_SET_NAME - len(job) - 1
    if all(len(group.name) <= room for group in decision.chosen.groups):
        return decision
    groups: list[Group] = []
    for n, group in enumerate(decision.chosen.groups, 1):
        groups.append(replace(group, name=f"{group.name[: room - 3].strip('-')}-{n}"))
    chosen = replace(decision.chosen, groups=tuple(groups))
    candidates, trade_offs = (
        tuple(chosen if c == decision.chosen else c for c in listed)
        for listed in (decision.candidates, decision.trade_offs)
    )
    return replace(decision, chosen=chosen, candidates=candidates, trade_offs=trade_offs)


def planned(accepted: StoredPlan, *, plan_only: bool = False) -> Verdict:
    status = accepted.status
    text = (
        f"plan {status.number}: {status.summary}; predicted step {status.predicted.step_seconds:.3g} s, "
        f"training {status.predicted.total_seconds:.3g} s"
    )
    if (batch := status.batch_choice) is not None:
        text = f"{text}; global batch {batch.global_batch_size}: {batch.message}"
    if accepted.warning:
        text = f"{text}; {accepted.warning}"
    return Verdict("Planned", TRUE, "PlanOnly" if plan_only else "Planned", text)


def infeasible(found: Infeasible, running: StoredPlan | None) -> Verdict:
    text = f"{found.field}: {found.message}"
    if running is not None:
        text = f"{text}; plan {running.plan.number} stays in force"
    return Verdict("Planned", FALSE, found.reason, text)
