"""Make the plan of a job from its spec and the cluster, or find the reason why no plan is possible."""

from dataclasses import replace

from dlcontract import Plan
from dljob import kueue
from dljob.api import DLJobStatus, ParallelismStrategy, PlanningMode
from dljob.api.changes import planned_fields
from dljob.api.spec.spec import DLJobSpec
from dljob.cluster import ClusterView
from dljob.cluster.energy import HOUR_S
from dljob.job.defaults import applied_site, site_of
from dljob.job.observed import ClaimSeen, ClassSeen, SetSeen
from dljob.job.plan.grace import assumed_bandwidth, measured_write_s, too_short
from dljob.job.plan.node_terms import node_terms
from dljob.job.plan.request import planner_request
from dljob.job.plan.status import plan_status
from dljob.job.plan.stored import MAX_REFUSED_RANKS, StoredPlan
from dljob.job.plan.trainer import trainer_plan
from dljob.job.queue import QueueSeen
from dljob.job.scale_up import missing_nodes, plan_on_new_nodes, waiting_text
from dljob.planner import Decision, Group, Infeasible, Request, RunningBatch
from dljob.planner.candidates.pools import allowed, usable
from dljob.planner.plan import plan
from dljob.planner.types.texts import duration, gibibytes, of_which
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import left_out
from dljob.reconcile.planning.limits import within_limits
from dljob.reconcile.planning.pod_requests import cpu_m, pod_memory
from dljob.reconcile.rollout import quiet
from dljob.reconcile.spec import bound_ranks, one_node
from dljob.render import Names, RenderConfig, gang
from dljob.scheduling import NO_LIMITS
from dljob.status import FALSE, TRUE, Verdict, is_true

MAX_SET_NAME = 52
"""Maximum length of a StatefulSet name.

Kubernetes appends a hash of 11 characters to the name, and stores both in a pod label of at most 63 characters.
"""
MAX_PLAN_NBYTES = 2**20 - 2**12
"""Maximum size of a plan in bytes. A ConfigMap has at most 1 MiB, with its metadata."""
RETRY_S = 15.0
"""Seconds after which planning is retried if no plan was possible. Changes of nodes also cause a retry."""


PLACEMENT = ("scheduling.nodeSelector: ", "scheduling.tolerations: ")
"""Prefixes of the lines in ``ParsedJob.defaulted`` about defaults that limit the nodes of a job."""

LACK_OF_NODES = {"TooFewNodes", "NoSuchDevice"}
"""Reasons of Planned=False of a job that the cluster cannot run with the nodes that take pods now."""
_IN_EACH_RECONCILE = {
    "Accepted", "Admitted", "Planned", "VolumeReady", "PodsReady", "Running", "ReportValid", "Suspended",
    "Preempted", "PriorityClassFound", "WithinQuota", "DeadlineFeasible", "DeadlineAtRisk", "PlanEdited",
}  # fmt: skip
"""Conditions that do not affect a plan, and that change while a job starts, runs or waits."""
ANY_SET = SetSeen("", "", 0, "")
ANY_CLAIM = ClaimSeen("", "", ())
"""The job's own claim in a question, which says only that the claim exists: a plan then needs no quota for it."""
MODEL_PARALLELISM_WAS_SLOW = "this job's steps with model parallelism took longer than predicted"


def wants_plan(parsed: ParsedJob) -> bool:
    """Return True if the current spec needs a plan that does not exist yet."""
    spec = parsed.spec
    if spec is None or parsed.finished or spec.suspend:
        return False
    if parsed.plan_problem is not None and not quiet(parsed.observed):
        return False
    if spec.planning.mode is PlanningMode.PLAN_ONLY:
        return not _shown(parsed)
    return parsed.accepted is None or parsed.accepted.spec_digest != parsed.digest


def ready(parsed: ParsedJob) -> bool:
    """Return True if ``decide`` can return a result: it was computed earlier, or the view of the cluster is known."""
    return parsed.decision is not None or parsed.observed.view is not None


def decided(parsed: ParsedJob, config: RenderConfig) -> StoredPlan | Infeasible | None:
    """Return the result of ``decide``; None if it has none yet (``ready``)."""
    return decide(parsed, config) if ready(parsed) else None


def question(parsed: ParsedJob) -> ParsedJob:
    """Return the question that ``decide`` answers: the job with only the fields on which its plan depends.

    Questions are compared to reuse an earlier answer: equal questions have the same answer with the same cluster and
    profiles, which a question does not contain. Nor does it contain what changes while the job only runs or waits.
    """
    observed, before = parsed.observed, parsed.before
    kept = tuple(item for item in before.conditions if item.type not in _IN_EACH_RECONCILE)
    return replace(
        parsed,
        observed=replace(
            observed, job=replace(observed.job, spec={}, status={}), sets=observed.sets[:1] and (ANY_SET,), pods=(),
            claims=dict.fromkeys({Names.of(observed.job).claim} & observed.claims.keys(), ANY_CLAIM),
            classes=tuple(ClassSeen(item.name, default=True) for item in observed.classes or () if item.default),
            volumes={}, closed_nodes=(), plan=None, report=None, report_problem=None, lost_nodes={}, view=None,
            learned={}, rejected=None, queue=QueueSeen(), capacity_grew=False, place=None, outlook=None,
            limits=NO_LIMITS, node_conditions={}, preemption=None, room_for=None, resting=None, lacks_priority_class="",
            rejections=(), overdrawn=(), provisioning=None, plan_edit=None, plan_record=None, machine_nodes=1,
            usable_cpus={},
        ),
        before=DLJobStatus(conditions=kept, plan=before.plan, last_checkpoint=before.last_checkpoint),
        accepted=parsed.accepted and parsed.accepted.with_failures(None),
        report=parsed.report if parsed.accepted is None else None,
        report_problem=None,
        decision=None,
    )  # fmt: skip


def _shown(parsed: ParsedJob) -> bool:
    """Return True if the status already shows the PlanOnly plan of the current spec."""
    return any(
        c.type == "Planned" and c.status is TRUE and c.observed_generation == parsed.observed.job.generation
        for c in parsed.before.conditions
    )


def decide(parsed: ParsedJob, config: RenderConfig) -> StoredPlan | Infeasible:
    """Return a plan for the spec on the current cluster, or the reason why no plan is possible.

    If ranks would train in the same way with the new plan as with the job's current plan (equal ``Plan.digest``), the
    result contains the current plan with its number, so that no pod must restart.
    """
    if parsed.decision is not None:
        return parsed.decision
    found = _decide(parsed, config)
    if parsed.queued and parsed.within is None and isinstance(found, StoredPlan):
        return _with_partial_admission(parsed, config, found)
    return found


def _with_partial_admission(parsed: ParsedJob, config: RenderConfig, found: StoredPlan) -> StoredPlan:
    """Return the plan ``found``, changed so that Kueue may admit fewer pods, if the job can also run with fewer.

    That is so if a plan with the fewest allowed pods is possible. Every pod then requests enough for either plan:
    the fewer pods, the larger the local batch size, and with it the memory of a pod. Otherwise return ``found``.
    """
    assert parsed.spec is not None
    least = kueue.partial_minimum(parsed.spec, found)
    if least is None:
        return found
    [group] = found.groups
    fewest = _decide(replace(parsed, within=kueue.Within(((group.device, least, group.ranks_per_node),))), config)
    if isinstance(fewest, Infeasible) or fewest.cpu_m.keys() != found.cpu_m.keys():
        return found
    memory_nbytes = max(found.memory_nbytes, fewest.memory_nbytes)
    cpus_m = {name: max(value, fewest.cpu_m[name]) for name, value in found.cpu_m.items()}
    return found.model_copy(update={"memory_nbytes": memory_nbytes, "cpu_m": cpus_m, "least_nodes": least})


def _decide(parsed: ParsedJob, config: RenderConfig) -> StoredPlan | Infeasible:
    spec, view = _narrowed(parsed), parsed.observed.view
    assert view is not None
    job = parsed.observed.job
    request = planner_request(
        job.name, spec, _running_batch(parsed), site_of(parsed.defaults), HOUR_S * parsed.begin_hour, parsed.volumes
    )
    request = request if parsed.pace_s is None else request.at_pace(parsed.pace_s)
    splitting_disabled = _model_parallelism_was_slow(parsed)
    if splitting_disabled:
        request = replace(request, no_split_reason=MODEL_PARALLELISM_WAS_SLOW)

    def attempt(asked: Request, nodes: ClusterView) -> StoredPlan | Infeasible:
        return _attempt(parsed, config, asked, nodes, splitting_disabled=splitting_disabled)

    admitted = parsed.accepted if parsed.within is not None else None
    request = replace(request, memory_admitted=admitted is not None, refused_ranks=parsed.refused_ranks)
    request = bound_ranks.limited(request, parsed.bound_ranks, parsed.accepted)
    least = admitted.memory_nbytes if admitted is not None and admitted.status.memory else 0
    found: StoredPlan | Infeasible
    for nbytes in parsed.memory_to_try or (least,):
        found = within_limits(parsed, replace(request, memory_least_nbytes=nbytes), view, config, attempt)
        if isinstance(found, StoredPlan):
            break
    return found


def _narrowed(parsed: ParsedJob) -> DLJobSpec:
    """Return the spec, limited to what Kueue has admitted, and to one node if only one can use its claims."""
    assert parsed.spec is not None
    if parsed.within is not None:
        return parsed.within.narrow(parsed.spec)
    return one_node.limited(parsed.spec) if parsed.one_node_claim else parsed.spec


def _attempt(
    parsed: ParsedJob, config: RenderConfig, request: Request, whole: ClusterView, *, splitting_disabled: bool
) -> StoredPlan | Infeasible:
    """Return a plan for the request without regard to quotas, or the reason why none is possible.

    ``whole``: the cluster, including nodes that plans must not use. If a plan is possible only with such nodes, the
    reason names them. ``splitting_disabled``: True if model parallelism was slow; the plan stores this.
    """
    job, spec = parsed.observed.job, _narrowed(parsed)
    assert parsed.digest is not None and parsed.own_spec is not None
    view = whole.without(parsed.observed.left_out)
    existing, learned, new_nodes = view, parsed.observed.learned, None
    decision = plan(request, view, learned)
    if isinstance(decision, Infeasible):
        larger = plan_on_new_nodes(request, existing, learned, config.node_templates, parsed.not_provided)
        if larger is None:
            return left_out.named(parsed, request, whole, decision)
        decision, view = larger
        new_nodes = missing_nodes(request, decision, decision.domain.within(allowed(request, existing)))
    decision = _fitting(job.name, decision)
    current = parsed.accepted
    shown = parsed.before.plan if current is None and parsed.observed.sets else None
    last = current.plan.number if current else shown.number if shown else 0
    # Someone may have deleted the ConfigMap of the plan after the operator raised the term. The report of the last
    # coordinator still contains the term.
    term = current.plan.term if current else parsed.report.term if parsed.report else 1
    service = Names.of(job).service
    saved = parsed.before.last_checkpoint
    measured_s = measured_write_s(saved, decision.checkpoint_s)
    checkpoint_s = measured_s or decision.checkpoint_s
    proposed = trainer_plan(
        job.name, job.namespace, job.uid, spec, decision, last + 1, term, service, config.cluster_domain,
        checkpoint_s=checkpoint_s,
        former_grace_s=current.plan.grace_s if current and current.spec_digest == parsed.digest else None,
        refused_ranks=parsed.refused_ranks,
    )  # fmt: skip
    if current is not None and (contradicted := _by_checkpoint(parsed, current.plan, proposed)):
        return contradicted
    if current is not None and current.plan.digest() == proposed.digest():
        proposed = current.plan
    elif shown is not None and shown.digest == proposed.digest():  # Only the plan's ConfigMap was deleted.
        proposed = proposed.model_copy(update={"number": shown.number})
    assumed = assumed_bandwidth(spec, decision.checkpoint_s, measured_s)
    short = too_short(spec, proposed.grace_s, checkpoint_s, decision.chosen.prediction.step_p90_s)
    limits = parsed.limits if parsed.within is None else ()
    nodes = usable(request, decision.domain.within(view))
    memory_nbytes, memory_by_group = pod_memory(decision.chosen, request.memory_least_nbytes)
    prices = applied_site(parsed.defaults, (group.device for group in decision.chosen.groups))
    found = StoredPlan(
        plan=proposed,
        status=plan_status(spec, decision, proposed.number, proposed.digest(), (*parsed.defaulted, *prices)),
        cpu_m={group.name: cpu_m(group, nodes, request) for group in decision.chosen.groups},
        memory_nbytes=memory_nbytes,
        memory_by_group=memory_by_group or None,
        spec_digest=parsed.digest,
        spec=planned_fields(parsed.own_spec),
        resizes=0,
        splitting_disabled=splitting_disabled,
        refused_ranks=tuple(sorted(parsed.refused_ranks))[:MAX_REFUSED_RANKS] or None,
        warning="; ".join(filter(None, (decision.warning, short, assumed, *limits))) or None,
        defaults=None if parsed.defaults.empty else parsed.defaults,
        avoid=left_out.avoided(parsed, decision),
        domain=node_terms(left_out.reachable(decision, whole, () if new_nodes else request.volumes)),
        crosses_border=(decision.domain.crossing is not None and len(proposed.pods) > 1) or None,
        pod_group_api=gang.api_for(spec, config),
        topology_key=gang.topology_key(spec, config, decision.domain, request.topology.rack_label),
        new_nodes=new_nodes,
        provisioning_class=(config.provisioning_class or None) if new_nodes and not parsed.queued else None,
        start_timeout_s=config.node_templates.start_timeout_s if new_nodes else None,
    )
    return _too_large(found) or found


def _too_large(found: StoredPlan) -> Infeasible | None:
    """Return the reason if the API server would reject the plan's ConfigMap as too large; otherwise None."""
    nbytes = sum(len(text.encode()) for text in found.data().values())
    if nbytes <= MAX_PLAN_NBYTES:
        return None
    text = (
        f"found a plan with {len(found.plan.ranks)} ranks on {found.nodes} nodes, which takes {nbytes} bytes; expected "
        f"at most {MAX_PLAN_NBYTES} bytes. Lower spec.nodes.max, or use fewer nodes in spec.planning.groups"
    )
    return Infeasible("PlanTooLarge", "spec.nodes", text)


def _model_parallelism_was_slow(parsed: ParsedJob) -> bool:
    """Return True if strategy Auto chose model parallelism for this spec, and its steps took longer than predicted.

    This is a conclusion from the stored plan and the condition PlanContradicted: a job is planned again for an
    unchanged spec only if measurements contradict its plan, or if one of its nodes is faulty. Measured steps with model
    parallelism correct most the plans that are like the measured one. With model parallelism still allowed, the planner
    could therefore choose one of which less is known.
    """
    spec, current = parsed.spec, parsed.accepted
    if spec is None or current is None or spec.parallelism.strategy is not ParallelismStrategy.AUTO:
        return False
    contradicted = is_true(parsed.before.conditions, "PlanContradicted")
    slow = current.splitting_disabled or (contradicted and current.plan.splits_model)
    return current.spec_digest == parsed.digest and slow


def _running_batch(parsed: ParsedJob) -> RunningBatch | None:
    """Return the batch size that a job with ``batchSizeRange`` must continue to use; None if the planner may choose.

    The planner may choose for a new job, and if the user edited the spec before the first checkpoint. It may also
    choose if the range no longer contains the batch size; ``_by_checkpoint`` checks that choice.
    """
    spec, current = parsed.spec, parsed.accepted
    assert spec is not None
    bounds = spec.batch_size_range
    saved = parsed.before.last_checkpoint is not None and spec.checkpoint.enabled
    if bounds is None or not (saved or (current is not None and current.spec_digest == parsed.digest)):
        return None
    shown = current.status if current is not None else parsed.before.plan
    if shown is None:
        return None
    # The stored plan has the global batch. The sum over ranks from the status is correct only for data parallelism,
    # because with model parallelism each rank has the whole batch.
    batch = (
        current.plan.global_batch
        if current is not None
        else sum(share for group in shown.groups for share in group.batch_per_rank)
    )
    choice = shown.batch_choice  # None if the user has just added the range.
    least = bounds.min or spec.batch_size
    return RunningBatch(batch, choice.noise_scale if choice else None) if least <= batch <= bounds.max else None


def _by_checkpoint(parsed: ParsedJob, current: Plan, proposed: Plan) -> Infeasible | None:
    """Return the reason why the proposed plan cannot resume from the job's checkpoint; None if it can.

    The trainer would reject such a plan, and the job would fail. The job therefore continues with its current plan.
    """
    saved = parsed.before.last_checkpoint
    if saved is None or saved.name is not None or not (current.checkpoint.enabled and proposed.checkpoint.enabled):
        return None
    assert parsed.spec is not None
    begun = parsed.accepted.status.batch_choice if parsed.accepted else None
    open_ = begun is not None or parsed.spec.batch_size_range is not None
    for field, was, wanted in (
        (f"spec.{'batchSizeRange' if open_ else 'globalBatchSize'}", current.global_batch, proposed.global_batch),
        ("spec.seed", current.seed, proposed.seed),
        ("spec.model.name", current.model.name, proposed.model.name),
    ):
        if was != wanted:
            text = (
                f"found {wanted}; expected {was}, as in the job's checkpoint of step {saved.step}: set it back, or "
                "delete the job and create it again to train from the beginning"
            )
            return Infeasible("CheckpointContradicted", field, text)
    return None


def _fitting(job: str, decision: Decision) -> Decision:
    """Return the decision with group names that are short enough for the StatefulSet names of this job."""
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


def planned(accepted: StoredPlan, *, plan_only: bool = False, started: bool = False) -> Verdict:
    """Return the condition Planned=True with a description of the plan.

    ``plan_only``: no pods will be created. ``started``: all pods have run, so that none waits for new nodes.
    """
    status = accepted.status
    predicted, times = status.predicted, "no predicted time"
    if predicted.step_seconds > 0:
        p, total_s = predicted, predicted.total_seconds
        parts = of_which(total_s, p.fetch_seconds, p.evaluation_seconds, p.checkpoint_seconds)
        training = f"training {duration(total_s)}{parts}" if total_s else "no predicted run time"
        times = f"predicted step {duration(predicted.step_seconds)}, {training}"
    if status.structure:
        times = f"{times}, {status.structure}"
    if status.missing_fields:
        times = f"{times}; unset fields, and what they would enable: {'; '.join(status.missing_fields)}"
    text = f"plan {status.number}: {status.summary}; {times}"
    if (batch := status.batch_choice) is not None:
        text = f"{text}; global batch {batch.global_batch_size}: {batch.message}"
    if status.memory:
        text = f"{text}; {gibibytes(accepted.memory_nbytes)} of memory per pod, {status.memory}"
    if status.placement:
        text = f"{text}; {status.placement}"
    if accepted.warning:
        text = f"{text}; {accepted.warning}"
    if accepted.new_nodes and not started:
        text = f"{text}; {waiting_text(accepted.new_nodes, asks=accepted.provisioning_class is not None)}"
    if status.defaults:
        text = f"{text}; the administrator's defaults apply: {'; '.join(status.defaults)}"
    return Verdict("Planned", TRUE, "PlanOnly" if plan_only else "Planned", text)


def infeasible(found: Infeasible, parsed: ParsedJob) -> Verdict:
    """Return the condition Planned=False with the reason ``found`` why no plan is possible."""
    running, text = parsed.accepted, f"{found.field}: {found.message}"
    if found.reason in LACK_OF_NODES and (closed := parsed.observed.closed_nodes):
        more = f" and {len(closed) - left_out.MAX_NAMED} more" if len(closed) > left_out.MAX_NAMED else ""
        text = f"{text}; nodes that take no pods now: {', '.join(closed[: left_out.MAX_NAMED])}{more}"
    if limits := [line for line in parsed.defaulted if line.startswith(PLACEMENT)]:
        text = f"{text}; the administrator's defaults apply: {'; '.join(limits)}"
    if running is not None and not quiet(parsed.observed):
        text = f"{text}; the job continues with plan {running.plan.number}"
    return Verdict("Planned", FALSE, found.reason, text)
