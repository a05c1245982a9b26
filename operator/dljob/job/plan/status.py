"""Translate a planner's decision into ``status.plan``."""

from dljob.api import (
    BatchCandidate,
    BatchChoice,
    Candidate,
    DLJobSpec,
    PlanGroup,
    PlanStatus,
    Predicted,
    Rejected,
)
from dljob.api.spec.trainer import AgentSource
from dljob.job.plan.request import learning_rate_rule
from dljob.job.plan.trainer import parallelism
from dljob.perf.workload.observed import Structure
from dljob.planner import BatchDecision, Choice, Decision, Prediction
from dljob.planner.observed import text_of
from dljob.planner.placement import explanation

MAX_LINKS = 512
"""Maximum length of ``status.plan.links``. The names of device types in it have at most 63 characters each."""
MAX_ADVICE = 1024
"""Maximum length of ``status.plan.powerAdvice``. A plan with several types of GPUs has about 150 characters of each."""


def figures(value: float) -> float:
    """Round a value to four significant figures, which are easy to read and more precise than any prediction."""
    return float(f"{value:.4g}")


def predicted(prediction: Prediction) -> Predicted:
    return Predicted(
        step_seconds=figures(prediction.step_s),
        step_seconds_p90=figures(prediction.step_p90_s),
        compute_seconds=figures(prediction.compute_s),
        communication_seconds=figures(prediction.communication_s),
        total_seconds=figures(prediction.total_s),
        fetch_seconds=figures(prediction.fetch_s),
        evaluation_seconds=figures(prediction.evaluations_s),
        checkpoint_seconds=figures(prediction.checkpoints_s),
        interruption_seconds=figures(prediction.interruption_s),
        samples_per_second=figures(prediction.samples_per_s),
        energy_joules=None if prediction.energy_J is None else figures(prediction.energy_J),
        cost=None if prediction.cost_usd is None else figures(prediction.cost_usd),
        carbon_grams=None if prediction.carbon_g is None else figures(prediction.carbon_g),
        memory_bytes=prediction.memory_nbytes,
        bottleneck=prediction.bottleneck,
        basis=prediction.basis,
    )


def _batch_choice(spec: DLJobSpec, found: BatchDecision) -> BatchChoice:
    rule = learning_rate_rule(spec, found.chosen)
    rows = []
    for option in found.options:
        p = option.prediction
        known = {
            "step_seconds": p and figures(p.step_s),
            "total_seconds": p and figures(p.total_s),
            "energy_joules": p and p.energy_J and figures(p.energy_J),
            "cost": p and p.cost_usd and figures(p.cost_usd),
        }
        rows.append(
            BatchCandidate(
                global_batch_size=option.batch,
                chosen=option.batch == found.chosen,
                efficiency=figures(option.efficiency),
                steps=option.steps,
                reason=option.reason or None,
                **known,
            )
        )
    return BatchChoice(
        global_batch_size=found.chosen,
        steps=found.steps,
        message=found.text,
        noise_scale=None if found.noise is None else figures(found.noise),
        learning_rate_scaling=rule[0].value if rule else None,
        candidates=tuple(rows),
    )


def _candidate(choice: Choice, chosen: Choice) -> Candidate:
    nodes = sum(group.nodes for group in choice.groups)
    return Candidate(
        summary=choice.summary, chosen=choice == chosen, nodes=nodes, predicted=predicted(choice.prediction)
    )


def enabled_by(missing: tuple[str, ...], structure: Structure | None = None) -> tuple[str, ...]:
    """Return lines that tell the user what the missing fields of the spec would enable; empty if none is missing.

    ``missing``: names of the fields, as ``Request.missing`` has them. ``structure``: observed structure of the job's
    script, from which its step time is predicted; None if the spec has a model or the script was never observed.
    """
    if not missing:
        return ()
    names = [f"spec.{name}{' (or steps)' if name == 'epochs' else ''}" for name in missing]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    found = [
        f"{listed}: a prediction of step time and run time; checks of spec.objective.deadline and "
        "spec.scheduling.finishBy; a forecast for the queue; a check whether the model fits into memory; the choice of "
        "the best number of nodes and device type"
    ]
    if structure is not None:
        found = [f"{listed}: the choice of the best number of nodes and device type"]
        if "epochs" in missing and not structure.steps:
            found.append(
                "spec.epochs (or steps): a prediction of the run time; checks of spec.objective.deadline and "
                "spec.scheduling.finishBy; a forecast for the queue"
            )
    if "globalBatchSize" in missing:
        found.append(
            "spec.globalBatchSize: the variables DLJOB_GLOBAL_BATCH_SIZE and DLJOB_LOCAL_BATCH_SIZE in the script"
        )
    if "dataset" in missing:
        found.append(
            "spec.dataset: data of a claim or a server, whose path in the pod is in the variable DLJOB_DATASET in "
            "the script"
        )
    return tuple(found)


def plan_status(
    spec: DLJobSpec, decision: Decision, number: int, digest: str, defaults: tuple[str, ...] = ()
) -> PlanStatus:
    """Return ``status.plan``, which shows users the planner's decision, its candidates and its prediction.

    ``number``: number of the plan, counted from 1 for each job. ``digest``: digest of the trainer's plan. ``defaults``:
    lines about values that come from the administrator's defaults, as ``job.defaults.applied`` returns them.
    """
    chosen = decision.chosen
    return PlanStatus(
        number=number,
        digest=digest,
        summary=chosen.summary,
        groups=tuple(
            PlanGroup(name=g.name, device=g.device, nodes=g.nodes, ranks=len(g.shares), batch_per_rank=g.shares)
            for g in chosen.groups
        ),
        nodes=sum(g.nodes for g in chosen.groups),
        ranks=sum(len(g.shares) for g in chosen.groups),
        collective=chosen.collective,
        parallelism=parallelism(spec, chosen),
        micro_batches=chosen.micro_batches if chosen.strategy == "Pipeline" or chosen.micro_batches > 1 else None,
        replicas=chosen.replicas if chosen.replicas > 1 else None,
        precision=chosen.precision if decision.precision_reason else None,
        precision_reason=decision.precision_reason,
        activation_checkpointing=chosen.recomputes if decision.recomputation_reason else None,
        activation_checkpointing_reason=decision.recomputation_reason,
        batch_choice=_batch_choice(spec, decision.batch) if decision.batch else None,
        predicted=predicted(chosen.prediction),
        candidates=tuple(_candidate(c, chosen) for c in decision.candidates),
        trade_offs=tuple(_candidate(c, chosen) for c in decision.trade_offs if len(decision.trade_offs) > 1),
        next_measurement=decision.next_measurement,
        power_advice=decision.power_advice[:MAX_ADVICE] if decision.power_advice else None,
        rejected=tuple(Rejected(summary=r.summary, reason=r.reason) for r in decision.refusals),
        placement=explanation(decision),
        links=decision.links[:MAX_LINKS] if decision.links else None,
        defaults=defaults or None,
        agent=agent if (agent := spec.trainer.agent_source) is not AgentSource.FROM_IMAGE else None,
        missing_fields=enabled_by(decision.missing, decision.structure) or None,
        structure=text_of(decision.structure) if decision.structure else None,
        memory=decision.memory_text,
    )
