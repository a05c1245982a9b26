"""What a run has shown besides compute times, in its DLProfile: store it, and translate it for the planner.

This is the structure and the memory of a script, and the steps of ranks that each hold a part of the model.
"""

from dataclasses import replace
from datetime import datetime
from math import exp, log

from dljob.api import DLProfileStatus
from dljob.api.profiles.script import MeasuredMemory, ObservedStructure
from dljob.api.profiles.script import MeasuredSplit as StoredSplit
from dljob.api.profiles.steps import MAX_SPLIT_STEPS, SplitStep
from dljob.calibrate.learned import Place, SplitPoint
from dljob.calibrate.memory import MemoryPoint, Split, remembered
from dljob.perf.workload.observed import Collectives, Structure, Work

MAX_REPEATS = 5
"""Maximum number of earlier equal runs that count beside a new one, because neighbours and drivers change."""


def with_structure(
    before: DLProfileStatus, found: ObservedStructure | None, now: datetime, *, complete: bool
) -> DLProfileStatus | None:
    """Return the status of a profile with the structure ``found`` that a run has shown; None if the run showed none.

    A structure without a step time does not replace an earlier one, nor does that of a run that goes on (not
    ``complete``) replace one with a step time, unless the script has become another one.
    """
    known = before.structure
    if found is None:
        return None
    same = known is not None and known.parameters == found.parameters
    better = found.step_seconds is not None and (complete or known is None or known.step_seconds is None)
    if found == known or (same and not better):
        return before
    return before.model_copy(update={"structure": found, "updated": now})


def planner_structure(stored: ObservedStructure | None, device: str) -> Structure | None:
    """Return a stored structure as the planner uses it. ``device``: the type of device of its profile."""
    if stored is None:
        return None
    return Structure(
        parameters=stored.parameters,
        flops=stored.flops_per_sample,
        activation_nbytes=stored.activation_bytes_per_sample,
        sample_nbytes=stored.sample_bytes,
        batch=stored.batch,
        optimizer_slots=stored.optimizer_slots,
        work=tuple(
            Work(each.kind, each.count, each.forward_flops_per_sample, each.moved_bytes_per_sample)
            for each in stored.work
        ),
        host_calls=None if stored.host_calls is None else tuple(stored.host_calls.model_dump(by_alias=False).items()),
        collectives=None
        if stored.collectives is None
        else tuple(Collectives(each.kind, each.count, each.total_bytes) for each in stored.collectives),
        device=device,
        nodes=stored.nodes,
        ranks_per_node=stored.ranks_per_node,
        cores=stored.cores,
        step_s=stored.step_seconds,
        steps=stored.steps,
        frozen_nbytes=stored.frozen_bytes,
    )


def with_memory(before: DLProfileStatus, found: MemoryPoint, now: datetime) -> DLProfileStatus:
    """Return the status of a profile after a run that has shown ``found`` about the memory of a pod."""
    points = remembered(planner_memory(before.memory), found)
    after = tuple(
        MeasuredMemory(
            ranks=each.ranks,
            batch=each.batch,
            strategy=each.strategy,
            peak_bytes=each.peak_nbytes,
            sufficient_bytes=each.sufficient_nbytes,
            insufficient_bytes=each.insufficient_nbytes,
            split=StoredSplit(
                parts=each.split.parts,
                replicas=each.split.replicas,
                micro_batches=each.split.micro_batches,
                checkpoints=each.split.checkpoints,
                part_bytes=each.parts_nbytes,
            )
            if each.split is not None
            else None,
        )
        for each in points
    )
    return before if after == before.memory else before.model_copy(update={"memory": after, "updated": now})


def planner_memory(stored: tuple[MeasuredMemory, ...] | None) -> tuple[MemoryPoint, ...]:
    """Return stored measurements of memory as the planner uses them."""
    return tuple(
        MemoryPoint(
            m.ranks,
            m.batch,
            m.strategy,
            m.peak_bytes,
            m.sufficient_bytes,
            m.insufficient_bytes,
            Split(m.split.parts, m.split.replicas, m.split.micro_batches, m.split.checkpoints) if m.split else None,
            m.split.part_bytes if m.split else (),
        )
        for m in stored or ()
    )


def with_split_step(before: DLProfileStatus, found: SplitPoint, now: datetime) -> DLProfileStatus:
    """Return the status of a profile after a run whose ranks each held a part of the model.

    Equal runs are one point, with the geometric mean of their times. The oldest points are left out if there are too
    many.
    """
    known = planner_split_steps(before.split_steps)
    points = [each for each in known if not each.like(found)]
    for each in known:
        if each.like(found):
            n = min(each.observations, MAX_REPEATS)
            mean_s = exp((n * log(each.step_s) + log(found.step_s)) / (n + 1))
            found = replace(found, step_s=mean_s, observations=n + 1)
    after = tuple(
        SplitStep(
            strategy=each.strategy,
            nodes=each.place.nodes,
            node_devices=each.place.node_devices,
            cores=each.place.cores,
            machine_nodes=each.place.machine_nodes,
            collective=each.place.collective,
            batch=each.batch,
            micro_batches=each.micro_batches,
            replicas=each.replicas,
            seconds=each.step_s,
            observations=each.observations,
        )
        for each in [*points, found][-MAX_SPLIT_STEPS:]
    )
    update = {"split_steps": after, "observed_jobs": before.observed_jobs + 1, "updated": now}
    return before.model_copy(update=update)


def planner_split_steps(stored: tuple[SplitStep, ...] | None) -> tuple[SplitPoint, ...]:
    """Return stored steps of models that ranks divide as the planner uses them."""
    return tuple(
        SplitPoint(
            s.strategy,
            Place(s.nodes, s.node_devices, s.collective, cores=s.cores, machine_nodes=s.machine_nodes),
            s.batch,
            s.seconds,
            s.micro_batches,
            s.replicas,
            s.observations,
        )
        for s in stored or ()
    )
