"""Tests of plans under the quotas and limit ranges of the job's namespace."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.job.observed import ClaimSeen
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import decide, question
from dljob.render import RenderConfig, stateful_sets
from dljob.render.gang import KUBERNETES_ALPHA
from dljob.scheduling import LimitRange, NamespaceLimits, Quota, pod_charge
from dljob.scheduling.limits.quotas import Scope, shortages
from support.builders import A100, CONFIG, CPUS, DIGITS, nodes, seen

Json = dict[str, Any]
ELASTIC: Json = {**DIGITS, "globalBatchSize": 1920, "nodes": {"min": 1, "max": 8}}
MANY = nodes({"name": "n", "count": 8, "cpu": 4, "memory": "8Gi"})
GPUS = nodes({"name": "g", "count": 4, "device": A100, "devices": 8, "cpu": 32, "memory": "256Gi"})
HEAVY: Json = {
    "model": {"hints": {"parameters": 300_000_000, "flopsPerSample": 4e12}},
    "dataset": {"uri": "pvc://data/train", "samples": 1_000_000},
    "trainer": {"command": ["python", "train.py"]},
    "globalBatchSize": 2048,
    "epochs": 3,
    "nodes": {"min": 1, "max": 4},
}


def quota(used: Json | None = None, name: str = "team", scopes: tuple[Scope, ...] = (), **hard: str) -> Quota:
    full = {key.replace("_", "."): value for key, value in hard.items()}
    status = {"hard": full, "used": used or {}}
    return replace(Quota.parse({"metadata": {"name": name}, "spec": {"hard": full}, "status": status}), scopes=scopes)


def gpus(count: int) -> Quota:
    return Quota("gpus", {"requests.nvidia.com/gpu": 1000 * count})


def limit_range(type: str = "Container", **fields: Json) -> LimitRange:  # noqa: A002 - the field's name
    return LimitRange.parse({"metadata": {"name": "sizes"}, "spec": {"limits": [{"type": type, **fields}]}})


def decided(spec: Json, *limits: Quota | LimitRange, view: Any = MANY) -> StoredPlan | Infeasible:
    found = NamespaceLimits(
        tuple(item for item in limits if isinstance(item, Quota)),
        tuple(item for item in limits if isinstance(item, LimitRange)),
    )
    return decide(parse_observed(seen(spec, view, limits=found)), CONFIG)


def planned(spec: Json, *limits: Quota | LimitRange, view: Any = MANY) -> StoredPlan:
    found = decided(spec, *limits, view=view)
    assert isinstance(found, StoredPlan), found
    return found


def refused(spec: Json, *limits: Quota | LimitRange, view: Any = MANY) -> Infeasible:
    found = decided(spec, *limits, view=view)
    assert isinstance(found, Infeasible), found.status.summary
    assert found.transient
    return found


def test_plan_without_limits_is_unchanged() -> None:
    plain = planned(ELASTIC)
    assert plain.charges is None and "charges" not in plain.data()["operator.json"]
    roomy = planned(ELASTIC, quota(pods="100"))
    assert roomy.model_copy(update={"charges": None}).data() == plain.data()
    assert roomy.charges is not None and roomy.charges.keys() == {"", *plain.cpu_m}


def test_charges_survive_storing() -> None:
    found = planned(ELASTIC, quota(pods="100"))
    assert StoredPlan.parse(found.data()).charges == found.charges


LEFT: dict[str, Quota] = {
    "pods": quota(pods="3"),
    "pods partly used": quota({"pods": "4"}, pods="7"),
    "all pods": Quota("team", {"count/pods": 3000}),
    "memory": quota(requests_memory="2Gi"),
    "memory limits": quota(limits_memory="2Gi"),
    "CPUs": quota(requests_cpu="2500m"),
    "only pods that do not end": quota(pods="3", scopes=(Scope("NotTerminating"),)),
}


@pytest.mark.parametrize("case", LEFT)
def test_plan_uses_what_the_quota_leaves(case: str) -> None:
    wide, narrow = planned(ELASTIC), planned(ELASTIC, LEFT[case])
    assert 1 <= narrow.nodes < wide.nodes
    assert narrow.charges is not None
    needs = [(narrow.charges[group.name], group.nodes) for group in narrow.groups]
    assert not shortages([LEFT[case]], needs)
    assert narrow.warning is not None and "ResourceQuota team" in narrow.warning


def test_scope_that_does_not_select_the_pods_is_ignored() -> None:
    other = (Scope("PriorityClass", "In", ("high",)),)
    assert planned(ELASTIC, quota(pods="0", scopes=other)).nodes == planned(ELASTIC).nodes
    high = {**ELASTIC, "scheduling": {"priorityClassName": "high"}}
    assert "team" in refused(high, quota(pods="0", scopes=other)).message


def test_default_priority_class_counts_for_scopes() -> None:
    """Fixed bug: with a quota for the default class, the API server rejected the pods of each plan."""
    scoped = quota(pods="2", scopes=(Scope("PriorityClass", "In", ("normal",)),))
    limits = NamespaceLimits((scoped,), priority_class="normal")
    found = decide(parse_observed(seen(ELASTIC, MANY, limits=limits)), CONFIG)
    assert isinstance(found, StoredPlan) and found.nodes == 2
    named = {**ELASTIC, "scheduling": {"priorityClassName": "other"}}
    found = decide(parse_observed(seen(named, MANY, limits=limits)), CONFIG)
    assert isinstance(found, StoredPlan) and found.nodes > 2


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16])
def test_plan_uses_the_gpus_that_are_left(count: int) -> None:
    found = planned(HEAVY, gpus(count), view=GPUS)
    assert sum(group.nodes * group.ranks_per_node for group in found.groups) <= count
    assert all(group.is_gpu for group in found.groups)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_plan_uses_the_gpus_that_a_quota_with_scopes_leaves(count: int) -> None:
    """Fixed bug: if the best plan had 8 GPUs on a node, the job waited for a quota of 8."""
    scoped = replace(gpus(count), scopes=(Scope("NotTerminating"),))
    found = planned({**HEAVY, "nodes": {"min": 1, "max": 1}}, scoped, view=GPUS)
    [group] = found.groups
    assert group.is_gpu and group.ranks_per_node <= count


@settings(max_examples=25, deadline=None)
@given(pods=st.integers(0, 10), cpu_m=st.integers(0, 12_000), memory_mib=st.integers(0, 6000))
def test_plan_fits_or_not_even_the_smallest_does(pods: int, cpu_m: int, memory_mib: int) -> None:
    limit = quota(pods=str(pods), requests_cpu=f"{cpu_m}m", requests_memory=f"{memory_mib}Mi")
    found = decided(ELASTIC, limit)
    single = decided({**ELASTIC, "nodes": {"min": 1, "max": 1}}, limit)
    if isinstance(found, Infeasible):
        assert found.reason == "QuotaExceeded" and "ResourceQuota team" in found.message
        assert isinstance(single, Infeasible)
        return
    assert found.charges is not None
    assert not shortages([limit], [(found.charges[group.name], group.nodes) for group in found.groups])


def test_three_gpus_left_serve_two_nodes_with_one_each() -> None:
    found = planned({**HEAVY, "nodes": {"min": 2, "max": 4}}, gpus(3), view=GPUS)
    assert found.nodes >= 2


def test_job_waits_for_gpus() -> None:
    found = refused({**HEAVY, "nodes": {"min": 2, "max": 4}, "devices": [A100]}, gpus(1), view=GPUS)
    assert found.reason == "QuotaExceeded" and found.field == "spec.nodes"
    assert (
        "ResourceQuota gpus: requests.nvidia.com/gpu has 0 of 1 used or reserved and 1 left, 2 needed" in found.message
    )


REFUSED: dict[str, tuple[Json, Quota | LimitRange, str, tuple[str, ...]]] = {
    # name: (spec, limit, reason, words)
    "too few pods": (DIGITS, quota({"pods": "1"}, pods="3"), "QuotaExceeded", ("team", "1 of 3", "2 left, 3 needed", "Wait")),
    "never enough pods": (DIGITS, quota(pods="2"), "QuotaExceeded", ("Raise pods of ResourceQuota team to at least 3",)),
    "no pods at all": (ELASTIC, quota(pods="0"), "QuotaExceeded", ("0 left, 1 needed",)),
    "no memory at all": (ELASTIC, quota(requests_memory="0"), "QuotaExceeded", ("requests.memory", "0Mi left")),
    "ConfigMaps": (ELASTIC, quota(configmaps="2"), "QuotaExceeded", ("configmaps", "3 needed")),
    "claims": (ELASTIC, quota(persistentvolumeclaims="0"), "QuotaExceeded", ("persistentvolumeclaims",)),
    "StatefulSets": (ELASTIC, Quota("team", {"count/statefulsets.apps": 0}), "QuotaExceeded", ("count/statefulsets.apps",)),
    "Secrets": (ELASTIC, quota(secrets="0"), "QuotaExceeded", ("secrets",)),
    "fixed groups": (
        {**DIGITS, "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 3}]}},
        quota(pods="2"), "QuotaExceeded", ("2 left, 3 needed",),
    ),
    "limits that pods do not state": (ELASTIC, quota(limits_cpu="9"), "QuotaNeedsLimit", ("limits.cpu", "trainer", "team")),
    "memory below min": (
        {**ELASTIC, "resources": {"memory": "1Gi"}}, limit_range(min={"memory": "2Gi"}), "LimitRangeExceeded",
        ("LimitRange sizes", "expected at least 2048Mi"),
    ),
    "memory above max": (
        {**ELASTIC, "resources": {"memory": "2Gi"}}, limit_range(max={"memory": "1Gi"}), "LimitRangeExceeded",
        ("LimitRange sizes", "expected at most 1024Mi"),
    ),
    "CPU request above the default limit": (
        {**ELASTIC, "resources": {"cpu": "2"}}, limit_range(default={"cpu": "1"}), "LimitRangeExceeded",
        ("default limit of 1", "spec.resources.cpuLimit"),
    ),
    "disk above max": (
        {**ELASTIC, "trainer": {"scratch": {"size": "4Gi"}}}, limit_range(max={"ephemeral-storage": "1Gi"}),
        "LimitRangeExceeded", ("ephemeral-storage", "Set spec.trainer.scratch.size to an allowed value"),
    ),
    "claim above max": (
        ELASTIC, limit_range("PersistentVolumeClaim", max={"storage": "1Mi"}), "LimitRangeExceeded", ("claim", "1Mi"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_the_limit(case: str) -> None:
    spec, limit, reason, words = REFUSED[case]
    found = refused(spec, limit)
    assert found.reason == reason
    assert all(word in found.message for word in words), found.message


ADJUSTED: dict[str, tuple[LimitRange, Json]] = {
    "min": (limit_range(min={"memory": "2Gi", "cpu": "1200m"}), {"requests": {"memory": "2048Mi", "cpu": "1200m"}}),
    "default limit": (limit_range(default={"cpu": "500m"}), {"requests": {"cpu": "500m"}}),
    "default limit and ratio": (
        limit_range(default={"cpu": "3"}, maxLimitRequestRatio={"cpu": "2"}), {"requests": {"cpu": "1500m"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ADJUSTED)
def test_requests_follow_the_limit_range(case: str) -> None:
    each, expected = ADJUSTED[case]
    assert requests_of(ELASTIC, each).items() >= expected["requests"].items()


def test_requests_follow_the_ratio_to_the_limit_of_the_spec() -> None:
    """Fixed bug: the job waited for ever, although a larger request was possible."""
    ratio = limit_range(maxLimitRequestRatio={"cpu": "2"})
    assert requests_of({**ELASTIC, "resources": {"cpuLimit": "3"}}, ratio)["cpu"] == "1500m"


def requests_of(spec_: Json, each: LimitRange) -> Json:
    """Return what the trainer containers request with a plan on nodes with 2 CPUs."""
    one_core = nodes({"name": "n", "count": 8, "cpu": 2, "memory": "8Gi"})
    found = planned(spec_, each, view=one_core)
    observed = seen(spec_, one_core)
    spec = parse_observed(observed).spec
    assert spec is not None
    [manifest] = stateful_sets(observed.job, spec, found, CONFIG)
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    requests: Json = container["resources"]["requests"]
    return requests


@pytest.mark.parametrize(
    ("limit", "per_pod", "whole"),
    [
        (limit_range(max={"cpu": "2"}, default={"cpu": "2"}), 2000, 16_000),
        (limit_range(default={"cpu": "1500m"}), 1000, 8000),
        (quota(requests_cpu="9"), 3000, 9000),
        (quota({"requests.cpu": "5"}, requests_cpu="9"), 3000, 4000),
    ],
)
def test_cores_follow_limit_ranges_and_quotas(limit: Quota | LimitRange, per_pod: int, whole: int) -> None:
    found = planned(ELASTIC, limit)
    [group] = found.groups
    assert group.cpu_m <= per_pod and 0.7 * whole < group.nodes * group.cpu_m <= whole
    assert group.cpu_m >= 1000 * group.ranks_per_node * group.cores or group.cores == 1


@pytest.mark.parametrize(
    "limit",
    [
        quota(limits_cpu="32"),
        limit_range(min={"memory": "300Mi", "cpu": "500m"}),
        limit_range(maxLimitRequestRatio={"memory": "1", "cpu": "2"}),
    ],
    ids=["quota of limits", "minimum", "ratio"],
)
def test_init_containers_are_sized_like_the_trainer(limit: Quota | LimitRange) -> None:
    """Fixed bug: an own image waited for ever, because the init container of the agent had no CPU limit."""
    resources = {"cpu": "1", "cpuLimit": "2", "memory": "1Gi"}
    trainer = {"framework": "Torchrun", "image": "mine", "command": ["train"]}
    source = {"configMap": {"name": "script"}}
    data = {"uri": "https://example.invalid/a.npz", "samples": 1920}
    bare = {"nodes": {"min": 1, "max": 8}}
    for job in (
        {**bare, "trainer": trainer},
        {**bare, "trainer": {**trainer, "source": source}},
        ELASTIC | {"dataset": data},
    ):
        assert planned({**job, "resources": resources}, limit).nodes > 0


def test_nodes_without_room_for_the_least_requests_are_not_used() -> None:
    mixed = nodes(
        {"name": "s", "count": 4, "cpu": 4, "memory": "1Gi"}, {"name": "l", "count": 2, "cpu": 4, "memory": "8Gi"}
    )
    assert planned(ELASTIC, limit_range(min={"memory": "2Gi"}), view=mixed).nodes == 2
    found = refused({**DIGITS, "nodes": {"min": 3, "max": 3}}, limit_range(min={"memory": "2Gi"}), view=mixed)
    assert found.reason == "TooFewNodes" and "LimitRange" in found.message


def test_default_limits_count_for_quotas() -> None:
    found = planned(ELASTIC, quota(limits_cpu="2"), limit_range(default={"cpu": "500m"}))
    assert found.nodes == 4 and found.charges is not None
    assert dict(found.charges["cpu"].amounts)["limits.cpu"] == 500


def test_limits_are_no_part_of_the_question() -> None:
    limits = NamespaceLimits((quota(pods="0"),))
    parsed = parse_observed(seen(ELASTIC, MANY))
    assert question(parse_observed(seen(ELASTIC, MANY, limits=limits))) == question(parsed)


def test_infeasible_for_another_reason_stays_so() -> None:
    found = decided({**DIGITS, "nodes": {"min": 9, "max": 9}}, quota(pods="0"), view=CPUS)
    assert isinstance(found, Infeasible) and found.reason == "TooFewNodes"


def test_running_job_keeps_its_objects() -> None:
    """A job with a plan has its ConfigMaps already: a quota that is full of them does not stop a new plan."""
    first = planned(ELASTIC, quota(pods="9"))
    observed = seen({**ELASTIC, "epochs": 6}, MANY, plan=first.data(), limits=NamespaceLimits((quota(configmaps="0"),)))
    assert isinstance(decide(parse_observed(observed), CONFIG), StoredPlan)


def replanned(first: StoredPlan, spec: Json, *limits: Quota, config: RenderConfig = CONFIG, **more: Any) -> Any:
    """Return the decision for a job that has the plan ``first`` and a changed spec, under quotas."""
    observed = seen(spec, MANY, plan=first.data(), limits=NamespaceLimits(limits), **more)
    return decide(parse_observed(observed), config)


GANG = replace(CONFIG, pod_group_api=KUBERNETES_ALPHA)
POD_GROUPS = "count/podgroups.scheduling.k8s.io"
BUDGETS = "count/poddisruptionbudgets.policy"
CLAIMS = "persistentvolumeclaims"
AVOID = {**ELASTIC, "scheduling": {"disruption": "Avoid"}}
WITHOUT_CLAIM = {**ELASTIC, "checkpoint": {"enabled": False}}
NEW_OBJECTS: dict[str, tuple[RenderConfig, Json, Json, str]] = {
    "a PodGroup for another number of pods": (GANG, ELASTIC, {**ELASTIC, "nodes": {"min": 1, "max": 2}}, POD_GROUPS),
    "a PodDisruptionBudget": (CONFIG, ELASTIC, AVOID, BUDGETS),
    "a checkpoint claim": (CONFIG, WITHOUT_CLAIM, ELASTIC, CLAIMS),
}
"""Name → (config, spec of the first plan, changed spec, resource of a quota of which the new plan needs one more)."""


@pytest.mark.parametrize("case", NEW_OBJECTS)
def test_new_objects_of_another_plan_count(case: str) -> None:
    config, before, after, resource = NEW_OBJECTS[case]
    first = decide(parse_observed(seen(before, MANY)), config)
    assert isinstance(first, StoredPlan)
    full = Quota("team", {resource: 1000}, {resource: 1000})
    found = replanned(first, after, full, config=config)
    assert isinstance(found, Infeasible) and found.reason == "QuotaExceeded" and resource in found.message
    found = replanned(first, after, replace(full, hard={resource: 2000}), config=config)
    assert isinstance(found, StoredPlan) and found.charges is not None
    assert dict(found.charges[""].amounts)[resource] == 1000


@pytest.mark.parametrize("case", NEW_OBJECTS)
def test_objects_that_both_plans_have_do_not_count_again(case: str) -> None:
    config, _, spec, resource = NEW_OBJECTS[case]
    first = decide(parse_observed(seen(spec, MANY)), config)
    assert isinstance(first, StoredPlan)
    claims = {"digits-checkpoints": ClaimSeen("digits-checkpoints", "Bound", ("ReadWriteMany",))}
    full = Quota("team", {resource: 1000}, {resource: 1000})
    found = replanned(first, {**spec, "epochs": 6}, full, config=config, claims=claims)
    assert isinstance(found, StoredPlan) and found.charges is not None
    assert resource not in dict(found.charges[""].amounts)


def test_claim_that_exists_is_not_new_for_a_first_plan() -> None:
    """A claim with the reclaim policy Retain outlives its job, and a job of the same name continues with it."""
    claims = {"digits-checkpoints": ClaimSeen("digits-checkpoints", "Bound", ("ReadWriteMany",))}
    limits = NamespaceLimits((Quota("team", {CLAIMS: 0}),))
    found = decide(parse_observed(seen(ELASTIC, MANY, claims=claims, limits=limits)), CONFIG)
    assert isinstance(found, StoredPlan), found


def test_charge_is_that_of_the_rendered_pods() -> None:
    found = planned(ELASTIC, quota(pods="9"))
    observed = seen(ELASTIC, MANY)
    spec = parse_observed(observed).spec
    assert spec is not None and found.charges is not None
    for group, manifest in zip(found.groups, stateful_sets(observed.job, spec, found, CONFIG), strict=True):
        assert found.charges[group.name] == pod_charge(manifest["spec"]["template"]["spec"])
