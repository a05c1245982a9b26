"""Tests of the PodGroups of a job: their form, which pods name them, and that running jobs keep what they have."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.api.defaults import JobDefaults
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile import reconcile
from dljob.render import RenderConfig
from dljob.render.gang import (
    API_VERSIONS,
    COSCHEDULING_API,
    KUBERNETES_ALPHA,
    KUBERNETES_BETA,
    KUBERNETES_FIRST,
    VOLCANO_API,
    pod_group,
    with_pod_group,
)
from dljob.status import pods_ready
from support.builders import (
    A100,
    CONFIG,
    DIGITS,
    MIXED,
    NOW,
    T4,
    Json,
    after,
    nodes,
    planned,
    rendered,
    seen,
    settled,
)
from support.job_lifecycle import kinds, started, training
from support.manifests.schema_validation import assert_valid

ALL = [version for versions in API_VERSIONS.values() for version in versions]
NATIVE = (KUBERNETES_BETA, KUBERNETES_ALPHA, KUBERNETES_FIRST)
KINDS = {"PodGroup", "Workload"}
SINCE = {KUBERNETES_FIRST: "1.35.0", KUBERNETES_ALPHA: "1.36.0", KUBERNETES_BETA: "1.37.0"}
"""The release of Kubernetes that serves the API version."""


def _group_schema(**spec: Json) -> Json:
    """Return the schema of a PodGroup whose spec has only the fields of dljob, as its CRD has them."""
    closed = {"type": "object", "additionalProperties": False, "required": ["minMember"], "properties": spec}
    metadata = {"type": "object", "required": ["name", "namespace", "ownerReferences"]}
    properties = {"apiVersion": {"type": "string"}, "kind": {"const": "PodGroup"}, "metadata": metadata, "spec": closed}
    return {"type": "object", "additionalProperties": False, "required": [*properties], "properties": properties}


_COUNT: Json = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
SCHEMAS = {
    COSCHEDULING_API: _group_schema(minMember=_COUNT),
    VOLCANO_API: _group_schema(minMember=_COUNT, priorityClassName={"type": "string"}, queue={"type": "string"}),
}
"""Written after the CRDs of scheduler-plugins and Volcano. Neither scheduler runs in these tests."""


def config(api_version: str | None) -> RenderConfig:
    return replace(CONFIG, pod_group_api=api_version)


def objects(
    api_version: str | None, name: str = "digits", view: Any = None, **spec: Any
) -> tuple[list[Json], list[Json]]:
    """Return the PodGroups of a new job, and its pod templates. ``spec``: changed fields; the scheduler is volcano."""
    scheduling = {"schedulerName": "volcano", **spec.pop("scheduling", {})}
    observed = seen({**DIGITS, **spec, "scheduling": scheduling}, name=name, **({"view": view} if view else {}))
    made = rendered(observed, config(api_version))
    templates = [item["spec"]["template"] for item in made if item["kind"] == "StatefulSet"]
    return [item for item in made if item["kind"] in KINDS], templates


def named(template: Json) -> Json:
    """Return the places in which a pod template may name a PodGroup → the name."""
    metadata = template["metadata"]
    found = {
        "schedulingGroup": (template["spec"].get("schedulingGroup") or {}).get("podGroupName"),
        "workloadRef": (template["spec"].get("workloadRef") or {}).get("name"),
        "label": metadata["labels"].get("scheduling.x-k8s.io/pod-group"),
        "annotation": metadata["annotations"].get("scheduling.k8s.io/group-name"),
    }
    return {place: name for place, name in found.items() if name is not None}


PLACES = {
    KUBERNETES_BETA: "schedulingGroup", KUBERNETES_ALPHA: "schedulingGroup", KUBERNETES_FIRST: "workloadRef",
    COSCHEDULING_API: "label", VOLCANO_API: "annotation",
}  # fmt: skip


def pods_counted(group: Json) -> int:
    """Return the number of pods that are placed together."""
    spec = group["spec"]
    if group["kind"] == "Workload":
        [part] = spec["podGroups"]
        return int(part["policy"]["gang"]["minCount"])
    return int(spec["minMember"] if "minMember" in spec else spec["schedulingPolicy"]["gang"]["minCount"])


@pytest.mark.parametrize("api_version", ALL)
def test_all_groups_of_a_job_name_one_pod_group_that_counts_all_pods(api_version: str) -> None:
    fixed = {"mode": "Fixed", "groups": [
        {"device": A100, "nodes": 1, "ranksPerNode": 2, "batchPerRank": 24},
        {"device": T4, "nodes": 2, "batchPerRank": 24},
    ]}  # fmt: skip
    spec = {"planning": fixed, "nodes": {"min": 1, "max": 4}, "collective": "MPI"}
    [group], templates = objects(api_version, view=MIXED, **spec)
    assert group["apiVersion"] == api_version
    assert len(templates) == 2
    for template in templates:
        assert named(template) == {PLACES[api_version]: group["metadata"]["name"]}
    assert pods_counted(group) == 3
    [owner] = group["metadata"]["ownerReferences"]
    assert owner["kind"] == "DLJob" and owner["controller"]


@pytest.mark.parametrize("api_version", NATIVE)
def test_native_pod_group_and_pods_are_valid(api_version: str) -> None:
    made = rendered(seen({**DIGITS, "scheduling": {"priorityClassName": "batch"}}), config(api_version))
    assert KINDS & {item["kind"] for item in made}
    for manifest in made:
        assert_valid(manifest, [SINCE[api_version]])


@pytest.mark.parametrize("api_version", SCHEMAS)
def test_pod_groups_of_other_schedulers_match_their_schema(api_version: str) -> None:
    annotations = {"scheduling.volcano.sh/queue-name": "research"}
    overrides = [{"manager": "me", "metadata": {"annotations": annotations}}]
    [group], _ = objects(api_version, scheduling={"priorityClassName": "batch"}, podTemplateOverrides=overrides)
    jsonschema.validate(group, SCHEMAS[api_version])
    found = {key: value for key, value in group["spec"].items() if key != "minMember"}
    assert found == ({"priorityClassName": "batch", "queue": "research"} if api_version == VOLCANO_API else {})


def test_without_gang_scheduling_nothing_names_a_pod_group() -> None:
    groups, templates = objects(None)
    assert groups == [] and [named(template) for template in templates] == [{}]


ZONED: Json = {"topology": {"betweenZones": {"bandwidth": "100M"}, "betweenRacks": {"bandwidth": "500M"}}}
RACKS = nodes(
    *(
        {"name": f"{zone}{rack}", "count": 2, "device": T4, "devices": 1, "zone": zone, "rack": rack,
         "cpu": 8, "memory": "64Gi"}
        for zone in "ab" for rack in ("1", "2")
    )
)  # fmt: skip
PLACED: dict[str, tuple[Json, int, str | None]] = {
    "one rack": (ZONED, 2, "topology.kubernetes.io/rack"),
    "one zone": ({"topology": {"betweenZones": {"bandwidth": "100M"}}}, 4, "topology.kubernetes.io/zone"),
    "all zones": (ZONED, 8, None),
    "no topology": ({}, 2, None),
}
"""Name → (the administrator's defaults, number of nodes, label that all nodes of the plan share)."""


@pytest.mark.parametrize("api_version", ALL)
@pytest.mark.parametrize("case", PLACED)
def test_pod_group_requires_the_rack_or_zone_for_which_the_plan_was_priced(case: str, api_version: str) -> None:
    defaults, count, label = PLACED[case]
    settings = replace(config(api_version), job_defaults=JobDefaults.model_validate(defaults))
    spec = {**DIGITS, "nodes": {"min": count, "max": count}, "scheduling": {"schedulerName": "volcano"}}
    made = rendered(seen(spec, RACKS), settings)
    [group] = [item for item in made if item["kind"] in KINDS]
    constraints = group["spec"].get("schedulingConstraints")
    if label is None or api_version not in (KUBERNETES_ALPHA, KUBERNETES_BETA):
        assert constraints is None
    else:
        assert constraints == {"topology": [{"key": label}]}
        assert_valid(group, [SINCE[api_version]])


@pytest.mark.parametrize("scheduler", [None, "default-scheduler"])
def test_volcano_gets_no_pod_group_of_jobs_that_it_does_not_place(scheduler: str | None) -> None:
    groups, templates = objects(VOLCANO_API, scheduling={"schedulerName": scheduler})
    assert groups == [] and [named(template) for template in templates] == [{}]


@given(
    pods=st.integers(1, 3),
    other=st.integers(1, 3),
    priority=st.sampled_from([None, "a", "b"]),
    api=st.sampled_from(ALL),
)
def test_pod_groups_of_one_name_have_one_spec_if_specs_cannot_change(
    pods: int, other: int, priority: str | None, api: str
) -> None:
    [one], _ = objects(api, nodes={"min": pods, "max": pods})
    [two], templates = objects(api, nodes={"min": other, "max": other}, scheduling={"priorityClassName": priority})
    if api == KUBERNETES_FIRST:
        assert templates[0]["spec"]["workloadRef"]["podGroup"] == two["spec"]["podGroups"][0]["name"]
    same_name, same_spec = one["metadata"]["name"] == two["metadata"]["name"], one["spec"] == two["spec"]
    assert same_name == (same_spec or api not in NATIVE)


def test_longest_job_name_gives_a_valid_pod_group_name() -> None:
    [group], _ = objects(KUBERNETES_ALPHA, name="j" * 40)
    assert len(group["metadata"]["name"]) <= 63


@pytest.mark.parametrize("api_version", ALL)
def test_job_that_runs_does_not_change_when_gang_scheduling_is_switched_on(api_version: str) -> None:
    running = training()
    later = reconcile(running, config(api_version), NOW + timedelta(seconds=30))
    assert not later.scales and not later.deletes
    assert not {"StatefulSet", *KINDS} & set(kinds(later))


@pytest.mark.parametrize("now_served", [None, KUBERNETES_BETA])
def test_job_that_runs_keeps_its_pods_when_the_server_drops_the_api(now_served: str | None) -> None:
    first = seen()
    running = settled(after(first, reconcile(first, config(KUBERNETES_ALPHA), NOW)))
    assert running.plan is not None
    assert StoredPlan.parse(running.plan).pod_group_api == KUBERNETES_ALPHA
    later = reconcile(running, config(now_served), NOW + timedelta(seconds=30))
    assert not later.scales and not later.deletes
    assert not {"StatefulSet", *KINDS} & set(kinds(later))
    assert "PodGroup" in kinds(reconcile(running, config(KUBERNETES_ALPHA), NOW + timedelta(seconds=30)))


def test_plan_of_a_later_release_with_an_unknown_pod_group_renders_none() -> None:
    observed = seen()
    unknown = planned(observed).model_copy(update={"pod_group_api": "scheduling.k8s.io/v9"})
    template = {"metadata": {"labels": {}}, "spec": {"containers": []}}
    spec = unknown.accepted_spec()
    assert spec is not None
    assert with_pod_group(template, observed.job, spec, unknown) == template
    assert pod_group(observed.job, spec, unknown, config("scheduling.k8s.io/v9")) == ()


def test_condition_quotes_the_pod_that_says_what_is_missing() -> None:
    """The first message is what the scheduler of Kubernetes 1.36.3 says of a pod that fits and waits for the others."""
    gang = (
        "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled, one or more plugins asked"
    )
    running = started()
    pods = [replace(pod, node=None, ready=False, unschedulable=gang) for pod in running.pods]
    pods[1] = replace(pods[1], unschedulable="0/3 nodes are available: 3 Insufficient cpu")
    found = pods_ready(replace(running, pods=tuple(pods)), 3, NOW)
    assert found.reason == "Unschedulable"
    assert f"{pods[1].name} (and 2 more): 0/3 nodes" in found.message


def test_plans_without_a_pod_group_are_stored_as_before() -> None:
    observed = started()
    assert observed.plan is not None
    assert "pod_group" not in observed.plan["operator.json"]
