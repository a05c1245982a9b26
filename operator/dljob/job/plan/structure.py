"""Translate the observed structure of a job's script from its report to the form in which profiles store it."""

from dlcontract import Report, RunPhase, Structure
from dljob.api import DLJobSpec
from dljob.api.profile import ObservedStructure, ObservedWork
from dljob.job.plan.stored import StoredPlan, threads

MAX_PER_SAMPLE = 1e18
"""Largest number of operations or bytes of a sample. A report with more is not used."""


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


def stored_structure(
    seen: Structure, nodes: int, ranks_per_node: int, cores: int | None, step_s: float | None, steps: int
) -> ObservedStructure:
    """Return what a rank has observed in the form in which profiles store it: for a sample in place of a step.

    ``nodes``, ``ranks_per_node``, ``cores``: the place of the run; ``cores``: CPUs of each rank, None on GPUs.
    ``step_s``, ``steps``: the time of a step and the number of all steps; None and 0 if they are unknown.
    """
    return ObservedStructure(
        parameters=seen.parameters,
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
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cores=cores,
        step_seconds=step_s,
        steps=steps,
    )
