"""Translate what a report shows besides compute times to the form that profiles store.

This is the structure and the memory of a script, and the step of ranks that each hold a part of the model.
"""

from dlcontract import Report, RunPhase, Structure
from dljob.api import DLJobSpec, Framework
from dljob.api.profiles.script import ObservedCollectives, ObservedHostCalls, ObservedStructure, ObservedWork
from dljob.calibrate.learned import Place, SplitPoint
from dljob.calibrate.memory import MemoryPoint, Split
from dljob.cluster import quantity
from dljob.job.plan.failures import FailureRecord
from dljob.job.plan.pod_groups import threads
from dljob.job.plan.request import computation
from dljob.job.plan.stored import StoredPlan
from dljob.perf.step.input_data import step_without_input_s

MAX_PER_SAMPLE = 1e18
"""Largest number of operations or bytes of a sample. A report with more is not used."""
MAX_ROUNDING = 2**20
"""Bytes by which the memory limit of a pod may exceed the memory of its plan, because pods request whole MiB."""


def observed_structure(spec: DLJobSpec, report: Report, accepted: StoredPlan) -> ObservedStructure | None:
    """Return the structure of a script that its report shows, in the form in which profiles store it.

    Return None if nothing was observed, if the spec has a model, or if a figure is absurd: the script wrote the report.
    The step time is stored only if the run shows what the same place takes: all planned ranks, on devices of one type,
    without a restart. It is that of the steps so far while the run goes on. The number of steps is stored at the end.
    """
    seen = report.structure
    if seen is None or "model" not in spec.missing or max(seen.flops, seen.activation_nbytes) > MAX_PER_SAMPLE:
        return None
    if seen.flops < seen.samples:  # With less than one operation per sample, the quotient may even be 0.
        return None
    group = accepted.groups[0]
    alike = len(accepted.groups) == 1 and seen.world_size == len(accepted.plan.ranks) and not report.mismatches
    timed = alike and not any(report.restarts.values())
    complete = report.phase is RunPhase.SUCCEEDED and not (report.outcome is not None and report.outcome.stopped)
    return stored_structure(
        seen,
        nodes=group.nodes if alike else 1,
        ranks_per_node=group.ranks_per_node if alike else 1,
        cores=None if group.is_gpu else threads(spec, group),
        step_s=(seen.step_s or None) if timed else None,
        steps=seen.steps if timed and complete else 0,
    )


def observed_memory(
    spec: DLJobSpec, report: Report | None, accepted: StoredPlan, *, failed: bool
) -> tuple[str, MemoryPoint] | None:
    """Return what a run of a training script has shown about the memory of a pod, with the type of device of this pod.

    The run succeeded, goes on, or ended for good (``failed``). Return None for built-in models, whose memory is
    predicted, and if nothing is known. A peak above the memory limit of the pod is not possible and therefore not used:
    the trainer wrote the report. The same holds for what ranks with a part of a split model have needed. The memory of
    the pods is sufficient if the run succeeded, and too little if it failed, after ranks or pods had reached their
    limit with this memory.

    If the operator has raised the memory, a peak below the amount that was too little is not used either: it was missed
    between two samples. A run that succeeded then counts as one that needed all that it had.
    """
    plan, record = accepted.plan, accepted.failures or FailureRecord()
    if not spec.trainer.command:
        return None
    of_plan = report if report is not None and report.plan_number == plan.number else None
    seen = of_plan.pod_memory if of_plan is not None else None
    ranks = [rank for rank in plan.ranks if rank.pod == (seen.pod if seen is not None else plan.ranks[0].pod)]
    planned = accepted.memory_of(ranks[0].group) if ranks else accepted.memory_nbytes
    limit = int(quantity(spec.resources.memory)) if spec.resources.memory else planned
    if seen is not None and seen.peak_nbytes > limit + MAX_ROUNDING:
        seen, ranks = None, [rank for rank in plan.ranks if rank.pod == plan.ranks[0].pod]
    complete = of_plan is not None and of_plan.phase is RunPhase.SUCCEEDED
    peak = seen.peak_nbytes if seen is not None else None
    enough, tight = None, None
    kills = record.memory_kills if record.counts_memory_of(accepted.spec) else 0
    exceeded = record.memory_exceeded_nbytes if kills else 0
    if kills > record.memory_answered:
        tight = limit if failed else None
    elif (peak or 0) > exceeded:
        enough = limit if complete else None
    elif exceeded:
        peak, enough, tight = (limit, limit, None) if complete else (None, None, exceeded)
    if not ranks or (peak or enough or tight) is None:
        return None
    share = max(rank.share for rank in ranks)
    how = computation(spec, plan)
    batch = None if spec.global_batch_size is None else max(1, -(-share // how.micro_batches))
    split = None
    if plan.splits_model:
        split = Split(plan.split_over, plan.replicas, plan.micro_batches, plan.checkpoint.enabled)
    parts = seen.parts if seen is not None and split is not None and peak == seen.peak_nbytes else ()
    if len(parts) != plan.split_over or not all(0 < part <= limit + MAX_ROUNDING for part in parts):
        parts = ()
    return ranks[0].device, MemoryPoint(len(ranks), batch, how.strategy, peak, enough, tight, split, parts)


def observed_split_step(
    spec: DLJobSpec, report: Report, accepted: StoredPlan, machine_nodes: int
) -> tuple[str, SplitPoint] | None:
    """Return the type of device and the step of a run whose ranks each held a part of the model.

    Return None for other runs, and unless all planned ranks ran, on devices of one type, within one rack and zone.
    ``machine_nodes``: the largest number of the run's nodes on one machine.
    """
    plan, group, how = accepted.plan, accepted.groups[0], computation(spec, accepted.plan)
    if not (plan.splits_model or how.strategy == "Sharded") or len(accepted.groups) > 1 or accepted.crosses_border:
        return None
    if report.mismatches or not report.step_s:
        return None
    if spec.trainer.framework is Framework.DLTRAIN:
        devices, ranks = {rank.device for rank in report.ranks}, len(report.ranks)
    else:  # Such a script reports its steps, but not the times of each rank.
        devices, ranks = {rank.device for rank in plan.ranks}, report.world_size
    unlike = group.is_gpu and 1 < group.nodes <= machine_nodes  # Steps of GPUs do not name the machine.
    if unlike or devices != {group.device} or ranks != len(plan.ranks):
        return None
    cores, near = (None, 1) if group.is_gpu else (threads(spec, group), machine_nodes)
    step_s = step_without_input_s(report.step_s, report.ranks, cores)
    place = Place(group.nodes, group.ranks_per_node, plan.collective, cores=cores, machine_nodes=near)
    kind = how.strategy
    assert kind in ("Sharded", "Pipeline", "Tensor"), "those whose ranks hold parts"
    return group.device, SplitPoint(kind, place, plan.global_batch, step_s, how.micro_batches, plan.replicas)


def stored_structure(
    seen: Structure, nodes: int, ranks_per_node: int, cores: int | None, step_s: float | None, steps: int
) -> ObservedStructure:
    """Return what a rank has observed in the form in which profiles store it: for a sample in place of a step.

    ``nodes``, ``ranks_per_node``, ``cores``: the place of the run; ``cores``: CPUs of each rank, None on GPUs.
    ``step_s``, ``steps``: the time of a step and the number of all steps; None and 0 if they are unknown.
    """
    return ObservedStructure(
        parameters=seen.parameters,
        frozen_bytes=seen.frozen_nbytes,
        flops_per_sample=seen.flops / seen.samples,
        activation_bytes_per_sample=seen.activation_nbytes / seen.samples,
        sample_bytes=float(seen.sample_nbytes),
        batch=seen.samples,
        optimizer_slots=seen.optimizer_slots,
        work=tuple(
            ObservedWork(
                kind=each.kind,
                count=each.count,
                forward_flops_per_sample=min(MAX_PER_SAMPLE, each.forward_flops / seen.samples),
                moved_bytes_per_sample=min(MAX_PER_SAMPLE, each.moved_nbytes / seen.samples),
            )
            for each in seen.work
        ),
        host_calls=None if seen.host is None else ObservedHostCalls(**seen.host.model_dump()),
        collectives=None
        if seen.collectives is None
        else tuple(
            ObservedCollectives(kind=each.kind, count=each.count, total_bytes=each.nbytes) for each in seen.collectives
        ),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cores=cores,
        step_seconds=step_s,
        steps=steps,
    )
