"""The observed structure of a script in its DLProfile: store a newer one, and translate it for the planner."""

from datetime import datetime

from dljob.api import DLProfileStatus
from dljob.api.profile import ObservedStructure
from dljob.perf.workload.observed import Structure, Work


def with_structure(before: DLProfileStatus, found: ObservedStructure | None, now: datetime) -> DLProfileStatus | None:
    """Return the status of a profile with the structure ``found`` that a run has shown; None if the run showed none.

    A structure without a step time, such as that of a run that goes on, does not replace an earlier one.
    """
    known = before.structure
    if found is None:
        return None
    if found == known or (known and found.step_seconds is None and known.parameters == found.parameters):
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
        device=device,
        nodes=stored.nodes,
        ranks_per_node=stored.ranks_per_node,
        cores=stored.cores,
        step_s=stored.step_seconds,
        steps=stored.steps,
    )
