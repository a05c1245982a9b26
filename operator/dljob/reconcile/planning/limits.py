"""Make plans that fit the ResourceQuotas and LimitRanges of the job's namespace, or say which one prevents a plan.

The manifests of a plan are rendered and checked as the API server would check them. If a quota leaves too little, the
planner is asked again with fewer nodes and smaller pods.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dljob.api import DLJobSpec
from dljob.cluster import ClusterView, Node
from dljob.cluster.catalogue import GPU_RESOURCES, vendor
from dljob.job.observed import ClassSeen
from dljob.job.plan.stored import StoredPlan
from dljob.job.waiting import QUOTA_EXCEEDED
from dljob.planner import Infeasible, Request
from dljob.planner.candidates.pools import wanted
from dljob.reconcile.parsed import ParsedJob
from dljob.render import Names, RenderConfig, checkpoint_claim, stateful_sets, support
from dljob.render.config import Manifest
from dljob.scheduling import Charge, NamespaceLimits, object_charge, pod_charge
from dljob.scheduling.limits.charges import thousandths
from dljob.scheduling.limits.limit_ranges import Bounds, bounds, claim_violation, violation, with_defaults
from dljob.scheduling.limits.quotas import Quota, Shortage, Unstated, amount_text, shortages, unstated

Attempt = Callable[[Request, ClusterView], StoredPlan | Infeasible]
"""Makes a plan for a request, without regard to quotas."""

REASONS = frozenset({QUOTA_EXCEEDED, "LimitRangeExceeded", "QuotaNeedsLimit"})
"""Reasons of errors about the limits of a namespace."""
FIELDS = {
    "cpu": "spec.resources.cpu", "memory": "spec.resources.memory", "ephemeral-storage": "spec.trainer.scratch.size",
    **dict.fromkeys(GPU_RESOURCES.values(), "spec.planning.groups"),
}  # fmt: skip
"""Resource → the field with which a user changes what a pod requests of it."""
MAX_ATTEMPTS = 6
"""Maximum number of plans that are tried before the plan with the fewest nodes that the spec allows."""
MAX_NAMED = 3
"""Maximum number of shortages (resources of which a quota leaves too little) that a message names."""


@dataclass(frozen=True)
class _Unfit:
    """A plan on ``nodes`` nodes that does not fit the limits of the namespace; 0 nodes: no plan was possible.

    ``reason``: the resulting error. ``shortages``: resources of quotas of which the plan needs more than is left.
    ``why``: text about the first obstacle. ``charge``: what one of its pods charges; None: that is not known.
    """

    reason: Infeasible
    nodes: int = 0
    shortages: tuple[Shortage, ...] = ()
    why: str = ""
    charge: Charge | None = None


def within_limits(
    parsed: ParsedJob, request: Request, view: ClusterView, config: RenderConfig, attempt: Attempt
) -> StoredPlan | Infeasible:
    """Return the best plan that fits the limits of the namespace, or the reason why there is none.

    The limits are its ResourceQuotas and LimitRanges. ``attempt`` makes a plan for a request and a view of the nodes.
    If there are quotas, the plan contains what its pods and other objects use of them (``StoredPlan.charges``).
    """
    limits = parsed.observed.limits
    if limits.empty:
        return attempt(request, view)
    least = bounds(limits.ranges)
    request, view = _with_default_limit(request, least), _with_room(view, request, least)
    decision = attempt(request, view)
    if isinstance(decision, Infeasible):
        never = _never_admitted(request, view, limits.quotas) if decision.reason == "DeviceBusy" else None
        return never or decision
    first = _checked(parsed, decision, limits, least, config)
    if isinstance(first, StoredPlan):
        return first

    def tried(asked: Request, nodes: ClusterView) -> StoredPlan | _Unfit:
        made = attempt(asked, nodes)
        return _Unfit(made) if isinstance(made, Infeasible) else _checked(parsed, made, limits, least, config)

    found = (
        _with_few_cpus(request, view, first, tried)
        if request.fixed
        else _smaller(request, view, limits, least, first, tried)
    )
    if isinstance(found, _Unfit):
        return found.reason
    why = f": {first.why}" if first.why else ""
    smaller = f"the best plan does not fit the limits of the namespace, so this plan is smaller{why}"
    return found.model_copy(update={"warning": f"{found.warning}; {smaller}" if found.warning else smaller})


def _never_admitted(request: Request, view: ClusterView, quotas: Sequence[Quota]) -> Infeasible | None:
    """Return an error if a quota is too small for the fewest pods of a job even if nothing else uses the quota.

    Without this error, a job that waits for devices would not say that it cannot start even if these become free. Only
    what the spec says counts, without a plan: the number of pods, their CPU and memory requests, and one GPU for each
    pod if the job can only use GPUs. Quotas with scopes do not count.
    """
    pods = sum(choice.nodes for choice in request.fixed) or max(1, request.nodes_min)
    needs = {"pods": 1000 * pods, "count/pods": 1000 * pods}
    for name, amount in (("cpu", request.cpu_per_pod), ("memory", request.memory_per_pod_nbytes)):
        needs |= dict.fromkeys((name, f"requests.{name}"), int(1000 * (amount or 0) * pods))
    names = (*request.devices, *(choice.device for choice in request.fixed))
    kinds = {
        vendor(node.device) if node.is_gpu else "" for node in view.nodes if not names or wanted(node.device, names)
    }
    if len(kinds) == 1 and (kind := kinds.pop()):
        gpus = sum(choice.nodes * choice.ranks_per_node for choice in request.fixed) or pods
        needs[f"requests.{GPU_RESOURCES[kind]}"] = 1000 * gpus
    short = tuple(
        Shortage(quota.name, name, quota.hard[name], quota.used.get(name, 0), needed)
        for quota in quotas
        for name, needed in sorted(needs.items())
        if not quota.scopes and name in quota.hard and needed > quota.hard[name]
    )
    return _exceeded(short, f"that the job needs at least {pods} nodes") if short else None


def _with_few_cpus(
    request: Request, view: ClusterView, first: _Unfit, tried: Callable[[Request, ClusterView], StoredPlan | _Unfit]
) -> StoredPlan | _Unfit:
    """Return the plan with the groups that the user fixes and the fewest CPUs, if it fits; otherwise ``first``."""
    found = tried(replace(request, cpus_max=0.0), view)
    return found if isinstance(found, StoredPlan) else first


def _smaller(
    request: Request,
    view: ClusterView,
    limits: NamespaceLimits,
    least: Bounds,
    first: _Unfit,
    tried: Callable[[Request, ClusterView], StoredPlan | _Unfit],
) -> StoredPlan | _Unfit:
    """Return the first smaller plan that fits the limits of the namespace. If none fits, return why the last does not.

    The first attempt asks for pods that are small enough for the limits. Further attempts also ask for fewer nodes. The
    last attempt asks for the minimum of nodes in the spec, with pods of any size. ``least``: values that LimitRanges
    allow for a pod. ``first``: the best plan without limits, which does not fit. ``tried``: makes a plan and checks it.
    """
    quotas = [quota for quota in limits.quotas if _counts(quota, first.charge)]
    fewest, gpus, cpus = max(1, request.nodes_min), _gpus_left(quotas), _cpus_left(quotas)
    capped, asked, last = _capped(view, quotas, least), replace(request, gpus_max=gpus, cpus_max=cpus), first
    for _ in range(MAX_ATTEMPTS):
        found = tried(asked, capped)
        if isinstance(found, StoredPlan):
            return found
        last = found if found.nodes else last
        if not found.shortages or found.nodes <= fewest:
            break
        asked = replace(asked, nodes_max=_fewer(found, fewest))
    # Nothing may be left at all. The message then says what the smallest plan needs.
    gpus = {name: max(fewest, left) for name, left in gpus.items()}
    found = tried(replace(request, nodes_max=fewest, gpus_max=gpus, cpus_max=0.0), view)
    return last if isinstance(found, _Unfit) and not found.nodes else found


def _with_default_limit(request: Request, least: Bounds) -> Request:
    """Return the request with the CPU limit of the LimitRanges: their default, or the maximum for a pod, if lower.

    Return the request unchanged if it has a CPU limit, or if there is neither. ``least``: values of the LimitRanges.
    Return it unchanged also if its pods request more CPUs than this limit: ``_checked`` then names the LimitRange.
    """
    limits = [each["cpu"] for each in (least.limit, least.most) if "cpu" in each]
    if not limits or request.cpu_limit_per_pod is not None or (request.cpu_per_pod or 0.0) > min(limits) / 1000:
        return request
    return replace(request, cpu_limit_per_pod=min(limits) / 1000)


def _with_room(view: ClusterView, request: Request, least: Bounds) -> ClusterView:
    """Return the view with a mark on each node that is too full for the smallest pod that the LimitRanges allow.

    Plans do not use marked nodes (``Node.left_out``). ``least``: values that the LimitRanges allow for a pod.

    If the spec sets the CPU or memory request, the minimum of a LimitRange for this resource is not applied here,
    because ``_checked`` compares it with the request later.
    """
    cpu_m = 0 if request.cpu_per_pod else least.least.get("cpu", 0)
    memory = 0 if request.memory_per_pod_nbytes else least.least.get("memory", 0)

    def marked(node: Node) -> Node:
        if node.left_out or (1000 * node.free_cpu >= cpu_m and 1000 * node.free_memory_nbytes >= memory):
            return node
        return replace(
            node, left_out="fewer CPUs or less memory free than a LimitRange of the namespace makes each pod request"
        )

    return ClusterView(tuple(marked(node) for node in view.nodes)) if cpu_m or memory else view


def _counts(quota: Quota, charge: Charge | None) -> bool:
    """Return True if a quota counts the job's pods. ``charge``: that of one of them; None: unknown."""
    return not quota.scopes or (charge is not None and all(scope.holds(charge) for scope in quota.scopes))


def _capped(view: ClusterView, quotas: Sequence[Quota], least: Bounds) -> ClusterView:
    """Return the view with no more free devices and memory per node than quotas and LimitRanges allow one pod.

    ``quotas``: those that count the job's pods. ``least``: values that LimitRanges allow for a pod.
    """
    memory = [least.most["memory"]] if "memory" in least.most else []
    for quota in quotas:
        names = ("memory", "requests.memory", "limits.memory")
        memory += [max(0, quota.left(name)) for name in names if name in quota.hard]
    gpus = _gpus_left(quotas)
    for name, resource in GPU_RESOURCES.items():
        if resource in least.most:
            gpus[name] = min(least.most[resource] // 1000, gpus.get(name, 2**31))

    def capped(node: Node) -> Node:
        most = gpus.get(vendor(node.device), node.free_devices) if node.is_gpu else node.free_devices
        return replace(
            node,
            free_devices=min(node.free_devices, most),
            free_memory_nbytes=min([node.free_memory_nbytes, *(each // 1000 for each in memory)]),
        )

    return ClusterView(tuple(capped(node) for node in view.nodes))


def _gpus_left(quotas: Sequence[Quota]) -> dict[str, int]:
    """Return how many more GPUs the quotas allow, for each vendor whose GPUs a quota limits."""
    found: dict[str, int] = {}
    for name, resource in GPU_RESOURCES.items():
        for quota in quotas:
            if f"requests.{resource}" in quota.hard:
                left = max(0, quota.left(f"requests.{resource}")) // 1000
                found[name] = min(left, found.get(name, left))
    return found


def _cpus_left(quotas: Sequence[Quota]) -> float | None:
    """Return how many more CPUs the quotas allow pods to request; None if no quota limits them."""
    left = [
        max(0, quota.left(name)) / 1000
        for quota in quotas
        for name in ("cpu", "requests.cpu", "limits.cpu")
        if name in quota.hard
    ]
    return min(left, default=None)


def _fewer(found: _Unfit, fewest: int) -> int:
    """Return the number of nodes to try next: as many as the quotas allow if all pods need the same resources.

    The number is below that of the plan that did not fit, but at least ``fewest``.
    """
    part = min(item.left / item.needed for item in found.shortages)
    return max(fewest, min(found.nodes - 1, int(found.nodes * part)))


def _checked(
    parsed: ParsedJob, found: StoredPlan, limits: NamespaceLimits, least: Bounds, config: RenderConfig
) -> StoredPlan | _Unfit:
    """Return the plan if the API server would accept its objects; otherwise the reason why it would not.

    CPU and memory requests are first raised or lowered to what LimitRanges allow, unless the spec sets them. If there
    are quotas, the returned plan contains what its objects use of them.
    """
    spec, job = parsed.spec, parsed.observed.job
    assert spec is not None
    found = _adjusted(found, spec, least)
    claim = checkpoint_claim(job, spec, found, parsed.observed.classes)
    if claim is not None and claim["metadata"]["name"] in parsed.observed.claims:
        claim = None
    if claim is not None and (
        wrong := claim_violation(claim["spec"]["resources"]["requests"]["storage"], limits.ranges)
    ):
        reason = _forbidden(
            "spec.checkpoint.volume.size", str(wrong), "Change spec.checkpoint.volume.size, or change the LimitRange"
        )
        return _Unfit(reason, found.nodes, why=str(wrong))
    claim = claim and _with_class(claim, parsed.observed.classes or ())
    sets = stateful_sets(job, spec, found, config)
    charges: dict[str, Charge] = {}
    for group, manifest in zip(found.groups, sets, strict=True):
        pod = with_defaults(manifest["spec"]["template"]["spec"], limits.ranges)
        pod.setdefault("priorityClassName", limits.priority_class)
        if wrong := violation(pod, limits.ranges):
            field = FIELDS.get(wrong.resource, "spec.podTemplateOverrides")
            values = (
                "and spec.resources.cpuLimit to allowed values" if wrong.resource == "cpu" else "to an allowed value"
            )
            remedy = f"Set {field} {values}, or change the LimitRange"
            return _Unfit(_forbidden(field, str(wrong), remedy), found.nodes, why=str(wrong))
        charges[group.name] = pod_charge(pod)
        if missing := unstated(limits.quotas, pod, charges[group.name]):
            return _Unfit(_must_state(missing), found.nodes, charge=charges[group.name])
    if not limits.quotas:
        return found
    charges[""] = object_charge(_new_objects(parsed, spec, found, config, claim, sets))
    charged = found.model_copy(update={"charges": charges})
    if not (short := shortages(limits.quotas, quota_needs(charged))):
        return charged
    reason = _exceeded(short, f"a plan with {found.nodes} nodes")
    return _Unfit(reason, found.nodes, short, str(short[0]), charges[found.groups[0].name])


def _with_class(claim: Manifest, classes: Iterable[ClassSeen]) -> Manifest:
    """Return the claim with the default StorageClass that it gets from the API server if it names no class.

    Quotas may limit the storage of one class. If the cluster has several default classes, the newest one counts, which
    the operator does not know. The claim then does not change.
    """
    defaults = [each.name for each in classes if each.default]
    if "storageClassName" in claim["spec"] or len(defaults) != 1:
        return claim
    return {**claim, "spec": {**claim["spec"], "storageClassName": defaults[0]}}


def quota_needs(plan: StoredPlan) -> list[tuple[Charge, int]]:
    """Return what the objects of a plan charge to quotas: pairs of the charge of an object and their number.

    Return an empty list if the plan was made without quotas.
    """
    charges = plan.charges or {}
    groups = [(group.name, group.nodes) for group in plan.groups] + [("", 1)]
    return [(charges[name], count) for name, count in groups if name in charges]


def _adjusted(found: StoredPlan, spec: DLJobSpec, least: Bounds) -> StoredPlan:
    """Return the plan with requests that the LimitRanges allow. Requests that the spec sets do not change."""
    changed: dict[str, object] = {}
    stated = spec.resources.cpu_limit
    limit = thousandths(stated) if stated else least.limit.get("cpu")
    low, high = least.least.get("cpu", 0), min(least.most.get("cpu", 2**62), limit or 2**62)
    if limit and "cpu" in least.ratio:
        low = max(low, -(-1000 * limit // least.ratio["cpu"]))
    if not spec.resources.cpu and (low or high < 2**62):
        changed["cpu_m"] = {name: max(1, low, min(value, high)) for name, value in found.cpu_m.items()}
    if not spec.resources.memory and found.least_memory_nbytes * 1000 < (low_m := least.least.get("memory", 0)):
        low = -(-low_m // 1000)
        changed["memory_nbytes"] = max(low, found.memory_nbytes)
        if found.memory_by_group:
            changed["memory_by_group"] = {name: max(low, nbytes) for name, nbytes in found.memory_by_group.items()}
    return found.model_copy(update=changed) if changed else found


def _new_objects(
    parsed: ParsedJob,
    spec: DLJobSpec,
    found: StoredPlan,
    config: RenderConfig,
    claim: Manifest | None,
    sets: Sequence[Manifest],
) -> list[Manifest]:
    """Return the objects other than pods that the operator would create for the plan, because quotas may count them.

    Objects that the job's existing plan made are left out. Another plan may need others of the same kind, such as a
    PodGroup for another number of pods. Older PodGroups, which exist until the job is deleted, are not known here: one
    that the plan would use again counts as new. ``claim``: the checkpoint claim to create, if any. ``sets``: the
    StatefulSets of the new plan, one for each group.
    """
    job, queue, before = parsed.observed.job, parsed.observed.queue, parsed.accepted
    objects = [*support(job, spec, found, config), *([claim] if claim is not None else [])]
    if parsed.queued and queue.workload is None:
        meta = {"name": Names.of(job).workload}
        objects.append({"apiVersion": queue.api_version, "kind": "Workload", "metadata": meta})
    if before is None:
        return [*objects, *sets, {"apiVersion": "v1", "kind": "Secret"}]
    made = {_identity(item) for item in support(job, before.accepted_spec() or spec, before, config)}
    groups = {group.name for group in before.groups}
    new_sets = [item for group, item in zip(found.groups, sets, strict=True) if group.name not in groups]
    return [*(item for item in objects if _identity(item) not in made), *new_sets]


def _identity(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


def _exceeded(short: tuple[Shortage, ...], found: str) -> Infeasible:
    listed = "; ".join(map(str, short[:MAX_NAMED])) + (f"; and {len(short) - MAX_NAMED} more" if short[3:] else "")
    never = [item for item in short if item.needed > item.hard]
    remedy = (
        f"Raise {never[0].resource} of ResourceQuota {never[0].quota} to at least "
        f"{amount_text(never[0].resource, never[0].needed)}, or lower spec.nodes.min or spec.resources"
        if never
        else "Wait until other objects of the namespace are gone, raise the quota, or lower spec.nodes.min"
    )
    text = f"found {found}, which exceeds the namespace's quota: {listed}. {remedy}"
    return Infeasible(QUOTA_EXCEEDED, "spec.nodes", text, transient=True)


def _forbidden(field: str, found: str, remedy: str) -> Infeasible:
    return Infeasible("LimitRangeExceeded", field, f"{found}. {remedy}", transient=True)


def _must_state(missing: Unstated) -> Infeasible:
    limits_cpu = missing.resource == "limits.cpu"
    field = "spec.resources.cpuLimit" if limits_cpu else "spec.podTemplateOverrides"
    text = (
        f"found container {missing.container} without {missing.resource}; expected a value, because ResourceQuota "
        f"{missing.quota} limits it. Set {field}, or give the namespace a LimitRange with a default"
    )
    return Infeasible("QuotaNeedsLimit", field, text, transient=True)
