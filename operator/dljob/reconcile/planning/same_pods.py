"""Let running pods run on after a change of the spec with which they would be the same.

A larger ``nodes.max`` or another objective often leads to the plan that the job has already. A restart would only cost
time.
"""

from collections.abc import Sequence

from dljob.api import DLJobSpec
from dljob.api.changes import with_immediate_fields
from dljob.api.defaults import NO_DEFAULTS
from dljob.job.defaults import with_defaults
from dljob.job.plan.stored import StoredPlan
from dljob.planner import VolumeLimit
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.rollout import in_force, quiet
from dljob.render import RenderConfig, stateful_sets


def run_on(parsed: ParsedJob, target: StoredPlan, config: RenderConfig) -> bool:
    """Return True if the pods of the present plan can run on under ``target``, the plan for a changed spec.

    They can if ranks train in the same way and if the pod templates are equal.
    """
    current, before = parsed.accepted, _spec_before(parsed)
    if current is None or before is None or parsed.spec is None or not _same_training(current, target):
        return False
    if current.spec_digest == target.spec_digest or not in_force(parsed.observed, current):
        return False
    job = parsed.observed.job
    old, new = stateful_sets(job, before, current, config), stateful_sets(job, parsed.spec, target, config)
    return [each["spec"] for each in old] == [each["spec"] for each in new]


def with_running_requests(parsed: ParsedJob, found: StoredPlan) -> StoredPlan:
    """Return the new plan ``found`` with the requests of the running pods if ranks train in the same way with it.

    The CPUs that a plan gives to pods also depend on what other pods leave free on the nodes. Return ``found`` itself
    if the spec asks for other resources than before, or if the pods must have more memory.

    The nodes of the running pods stay, too, if only volumes make the difference. The claim that dljob makes for
    checkpoints gets its volume after the job was planned, and the pods run where it is.
    """
    current, before = parsed.accepted, _spec_before(parsed)
    if current is None or before is None or parsed.spec is None or quiet(parsed.observed):
        return found
    if not _same_training(current, found) or before.resources != parsed.spec.resources:
        return found
    more_memory = max(parsed.memory_to_try, default=0) > current.least_memory_nbytes
    if more_memory or current.cpu_m.keys() != found.cpu_m.keys():
        return found
    domain = current.domain if _same_but_for_volumes(current, found, parsed.volumes) else found.domain
    memory = {"memory_nbytes": current.memory_nbytes, "memory_by_group": current.memory_by_group}
    return found.model_copy(update={"cpu_m": current.cpu_m, "domain": domain, **memory})


def _same_but_for_volumes(current: StoredPlan, found: StoredPlan, volumes: Sequence[VolumeLimit]) -> bool:
    """Return True if the domains of two plans have the same terms, apart from requirements of volumes."""
    of_volumes = {each for volume in volumes for term in volume.nodes.requirements() or () for each in term}
    one, other = (
        {frozenset(term) - of_volumes for term in plan.node_domain.terms or ((),)} for plan in (current, found)
    )
    return one == other


def _same_training(current: StoredPlan, target: StoredPlan) -> bool:
    return current.plan == target.plan and current.admission is None and target.admission is None


def _spec_before(parsed: ParsedJob) -> DLJobSpec | None:
    """Return the complete spec with which the running pods were made; None if the plan does not contain it."""
    current, own = parsed.accepted, parsed.own_spec
    planned = current.accepted_spec() if current is not None else None
    if current is None or own is None or planned is None:
        return None
    return with_defaults(with_immediate_fields(planned, own), current.defaults or NO_DEFAULTS)
