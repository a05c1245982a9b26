"""Tests of the operator's permissions, which must be exactly those of files/rbac.yaml."""

from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from dljob.job.observed import JobSeen
from dljob.render.helpers.look import look_objects
from dljob.render.helpers.probe import PROBE_PRIORITY
from dljob.render.support import _role
from support.manifests.helm_chart import CHART, MONITORED, of_kind, one, render

Json = dict[str, Any]
NAMESPACED = {
    "ConfigMap", "Deployment", "NetworkPolicy", "PodMonitor", "PrometheusRule", "Role", "RoleBinding", "Service",
    "ServiceAccount", "ServiceMonitor",
}  # fmt: skip
"""Kinds of objects of the chart that belong to a namespace."""
TABLE: dict[str, list[Json]] = yaml.safe_load((CHART / "files/rbac.yaml").read_text())


def permissions(rules: list[Json]) -> set[tuple[str, str, str]]:
    """Return (API group, resource, verb) of rules."""
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def operators(objects: list[Json]) -> Json:
    """Return the ClusterRole of the operator."""
    [binding] = of_kind(objects, "ClusterRoleBinding")
    return next(
        role for role in of_kind(objects, "ClusterRole") if role["metadata"]["name"] == binding["roleRef"]["name"]
    )


def test_every_permission_has_a_reason_and_no_wildcard() -> None:
    for rule in [rule for part in TABLE.values() for rule in part]:
        assert len(rule["reason"]) > 10
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_cluster_wide_permissions() -> None:
    objects = render()
    assert permissions(operators(objects)["rules"]) == permissions(TABLE["cluster"] + TABLE["jobs"])
    assert [r["metadata"]["name"] for r in of_kind(objects, "Role")] == ["dljob-self"]
    assert permissions(one(objects, "Role")["rules"]) == permissions(TABLE["self"])


@pytest.mark.parametrize(
    ("values", "namespaces"),
    [({"singleNamespaceInstall": True}, {"here"}), ({"watchNamespaces": ["a", "b"]}, {"a", "b"})],
)
def test_permissions_limited_to_namespaces(values: Json, namespaces: set[str]) -> None:
    objects = render(values, namespace="here")
    assert permissions(operators(objects)["rules"]) == permissions(TABLE["cluster"])
    roles = [r for r in of_kind(objects, "Role") if not r["metadata"]["name"].endswith("-self")]
    assert {r["metadata"]["namespace"] for r in roles} == namespaces
    assert all(permissions(r["rules"]) == permissions(TABLE["jobs"]) for r in roles)


def test_counting_all_pods_needs_a_permission_only_with_namespaces() -> None:
    values = {"operator": {"countAllPods": True}}
    everywhere, limited = render(values), render({**values, "watchNamespaces": ["a"]})
    assert permissions(operators(everywhere)["rules"]) == permissions(TABLE["cluster"] + TABLE["jobs"])
    assert permissions(operators(limited)["rules"]) == permissions(TABLE["cluster"] + TABLE["allPods"])
    assert permissions(TABLE["allPods"]) == {("", "pods", "list"), ("", "pods", "watch")}


KUEUE = {("kueue.x-k8s.io", "workloads"), ("kueue.x-k8s.io", "workloads/status")}
FLAVORS = {("kueue.x-k8s.io", "resourceflavors"), ("kueue.x-k8s.io", "workloadpriorityclasses")}


def of_kueue(rules: list[Json]) -> set[tuple[str, str]]:
    return {(group, resource) for group, resource, _ in permissions(rules) if group == "kueue.x-k8s.io"}


@pytest.mark.parametrize("enabled", ["auto", False, "false"])
def test_without_kueue_there_are_no_permissions_for_it(enabled: str | bool) -> None:
    """The engine renders as for a cluster that does not serve Kueue's API."""
    assert not of_kueue(operators(render({"kueue": {"enabled": enabled}}))["rules"])


def test_permissions_for_kueue_are_limited_to_namespaces_too() -> None:
    everywhere = render({"kueue": {"enabled": True}})
    assert of_kueue(operators(everywhere)["rules"]) == KUEUE | FLAVORS
    limited = render({"kueue": {"enabled": True}, "watchNamespaces": ["a"]})
    assert of_kueue(operators(limited)["rules"]) == FLAVORS
    [role] = [r for r in of_kind(limited, "Role") if r["metadata"]["namespace"] == "a"]
    assert permissions(role["rules"]) == permissions(TABLE["jobs"] + TABLE["kueueJobs"])
    assert {verb for _, resource, verb in permissions(TABLE["kueueCluster"])} == {"get"}


def test_cluster_permissions_exclude_secrets_and_workloads() -> None:
    """An operator limited to namespaces must not access objects of others."""
    assert not {resource for _, resource, _ in permissions(TABLE["cluster"])} & {
        "secrets", "configmaps", "statefulsets", "roles", "rolebindings", "serviceaccounts",
    }  # fmt: skip


def test_record_of_node_faults_is_the_only_config_map_of_the_operator() -> None:
    """Its name is that which the operator uses: the name of the Lease and a suffix."""
    objects = render({"fullnameOverride": "train", "singleNamespaceInstall": True})
    role = next(r for r in of_kind(objects, "Role") if r["metadata"]["name"].endswith("-self"))
    rules = [rule for rule in role["rules"] if rule["resources"] == ["configmaps"]]
    named = {verb: rule.get("resourceNames") for rule in rules for verb in rule["verbs"]}
    assert named == {"create": None, "get": ["train-node-faults"], "update": ["train-node-faults"]}
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"name": "DLJOB_LEASE_NAME", "value": "train"} in container["env"]


def own_role(objects: list[Json]) -> Json | None:
    """Return the Role of the operator in its own namespace, if it has one."""
    roles = [role for role in of_kind(objects, "Role") if role["metadata"]["name"].endswith("-self")]
    bindings = [b for b in of_kind(objects, "RoleBinding") if b["metadata"]["name"].endswith("-self")]
    assert len(roles) == len(bindings) <= 1
    return roles[0] if roles else None


def test_only_the_lease_of_the_release_may_be_written() -> None:
    role = own_role(render({"fullnameOverride": "train"}))
    assert role is not None
    rules = [rule for rule in role["rules"] if rule["resources"] == ["leases"]]
    assert {verb: rule.get("resourceNames") for rule in rules for verb in rule["verbs"]} == {
        "create": None, "get": ["train"], "update": ["train"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("feature", "resource"), [("leaderElection", "leases"), ("nodeFaults", "configmaps")], ids=["Leases", "node faults"]
)
def test_feature_that_is_off_has_no_permissions(feature: str, resource: str) -> None:
    """Fixed bug: the rules stayed, whatever the values said."""
    objects = render({feature: {"enabled": False}})
    role = own_role(objects)
    assert role is not None and resource not in {name for _, name, _ in permissions(role["rules"])}
    assert "leases" not in {name for _, name, _ in permissions(operators(objects)["rules"])} or feature == "nodeFaults"


def test_hardware_probes_may_create_pods_only_in_the_own_namespace() -> None:
    role = own_role(render({"probes": {"enabled": True}}))
    assert role is not None
    assert {verb for _, name, verb in permissions(role["rules"]) if name == "pods"} == {"create", "list", "delete"}
    for enabled in (False, True):
        rules = permissions(operators(render({"probes": {"enabled": enabled}, "tasks": {"enabled": False}}))["rules"])
        assert ("", "pods", "create") not in rules


LIMITED: Json = {"watchNamespaces": ["a", "b"]}


@pytest.mark.parametrize(
    ("values", "on"),
    [
        ({}, True),
        ({"probes": {"enabled": False}}, False),
        ({"singleNamespaceInstall": True}, False),
        (LIMITED, False),
        ({**LIMITED, "operator": {"countAllPods": True}}, True),
    ],
)
def test_hardware_is_measured_only_if_the_operator_sees_all_pods(values: Json, on: bool) -> None:
    """Otherwise, it does not know which nodes are idle."""
    objects = render(values)
    role = own_role(objects)
    assert role is not None
    assert ("pods" in {name for _, name, _ in permissions(role["rules"])}) is on
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["DLJOB_PROBES"] == str(on).lower()
    made = [each for each in of_kind(objects, "PriorityClass") if each["value"] < 0]
    assert len(made) == on
    for each in made:
        assert each["metadata"]["name"] == env["DLJOB_PROBE_PRIORITY_CLASS"]
        assert (each["value"], each["preemptionPolicy"]) == (PROBE_PRIORITY, "Never")
    named = render({**values, "probes": {**values.get("probes", {}), "priorityClassName": "background"}})
    assert all(each["value"] > 0 for each in of_kind(named, "PriorityClass"))


@pytest.mark.parametrize("enabled", [True, False])
def test_pods_of_jobs_are_created_only_for_tasks(enabled: bool) -> None:
    objects = render({"tasks": {"enabled": enabled}})
    assert (("", "pods", "create") in permissions(operators(objects)["rules"])) is enabled
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    [image] = [each["value"] for each in container["env"] if each["name"] == "DLJOB_LOOK_IMAGE"]
    assert image == (container["image"] if enabled else "")


def test_without_features_the_role_in_the_own_namespace_is_for_the_plan_key_only() -> None:
    role = own_role(render({name: {"enabled": False} for name in ("leaderElection", "nodeFaults", "probes")}))
    assert role is not None
    assert {resource for _, resource, _ in permissions(role["rules"])} == {"secrets"}


def test_operator_has_the_permissions_that_it_grants() -> None:
    """An API server rejects a Role with more permissions than its creator has."""
    assert permissions(TABLE["trainer"] + TABLE["look"]) <= permissions(TABLE["jobs"])


def test_agent_role_matches_the_table() -> None:
    """The Role that the operator renders for a job is the part ``trainer`` of the table, with the job's names."""
    job = JobSeen(name="JOB", namespace="a", uid="u", generation=1, created=datetime(2026, 1, 1, tzinfo=UTC), spec={})
    rendered = _role(job)["rules"]
    expected = [{key: value for key, value in rule.items() if key != "reason"} for rule in TABLE["trainer"]]
    for rules in (rendered, expected):
        for rule in rules:
            rule["verbs"] = sorted(rule["verbs"])
    assert rendered == expected
    [look] = [each["rules"] for each in look_objects(job) if each["kind"] == "Role"]
    assert look == [{key: value for key, value in rule.items() if key != "reason"} for rule in TABLE["look"]]


def test_operator_cannot_list_secrets() -> None:
    every = [rule for part in TABLE.values() for rule in part]
    assert {verb for _, resource, verb in permissions(every) if resource == "secrets"} == {"create", "get"}


def test_secrets_are_read_only_to_check_their_label() -> None:
    objects = render({"overrides": "all"})
    rules = [rule for role in of_kind(objects, "ClusterRole") + of_kind(objects, "Role") for rule in role["rules"]]
    of_secrets = [rule for rule in rules if "secrets" in rule["resources"]]
    assert {verb for rule in of_secrets if "resourceNames" not in rule for verb in rule["verbs"]} == {"create"}
    named = [(rule["resourceNames"], rule["verbs"]) for rule in of_secrets if "resourceNames" in rule]
    assert named == [(["dljob-plan-key"], ["get"])], "the operator's own key"


def test_bindings_name_the_service_account() -> None:
    objects = render({"serviceAccount": {"create": False, "name": "mine"}}, namespace="here")
    for binding in of_kind(objects, "ClusterRoleBinding") + of_kind(objects, "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "mine", "namespace": "here"}]
    assert one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert not of_kind(objects, "ServiceAccount")


@pytest.mark.parametrize(
    "limits",
    [
        ({"singleNamespaceInstall": True}, {"singleNamespaceInstall": True}),
        ({"watchNamespaces": ["a"]}, {"watchNamespaces": ["b"]}),
        ({}, {"singleNamespaceInstall": True}),
    ],
)
def test_releases_of_one_name_in_several_namespaces_share_no_object(limits: tuple[Json, Json]) -> None:
    """Fixed bug: both had the same ClusterRoles, so that Helm refused the second release."""
    first, second = (
        {
            (each["kind"], each["metadata"].get("namespace", namespace), each["metadata"]["name"])
            if each["kind"] in NAMESPACED
            else (each["kind"], "", each["metadata"]["name"])
            for each in render(MONITORED | {"kueue": {"enabled": True}} | values, namespace=namespace)
            if each["kind"] != "CustomResourceDefinition"  # Only one release may own these.
        }
        for namespace, values in zip(("here", "there"), limits, strict=True)
    )
    assert {kind for kind, _, _ in first} - NAMESPACED >= {"ClusterRole", "ClusterRoleBinding"}
    assert not first & second


def test_roles_of_a_release_for_all_namespaces_keep_their_names() -> None:
    """Administrators may have bound them."""
    names = {role["metadata"]["name"] for role in of_kind(render(), "ClusterRole")}
    assert names == {"dljob", "dljob-view", "dljob-edit", "dljob-plan"}


def test_users_of_namespaces_get_roles_for_jobs_only() -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind(render(), "ClusterRole")}
    for name, aggregated in (("dljob-view", "view"), ("dljob-edit", "edit")):
        role = roles[name]
        assert role["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{aggregated}"] == "true"
        assert {resource.split("/")[0] for _, resource, _ in permissions(role["rules"])} == {"dljobs"}
        assert "*" not in {verb for _, _, verb in permissions(role["rules"])}
    assert not any("status" in resource for _, resource, _ in permissions(roles["dljob-edit"]["rules"]))
    assert {r["metadata"]["name"] for r in of_kind(render({"rbac": {"userRoles": False}}), "ClusterRole")} == {"dljob"}


def test_role_for_plans_only_reads_and_nobody_has_it() -> None:
    """A list of pods shows the environment variables of all namespaces, so an administrator decides who may read it."""
    objects = render()
    role = {role["metadata"]["name"]: role for role in of_kind(objects, "ClusterRole")}["dljob-plan"]
    assert permissions(role["rules"]) == {
        ("", "nodes", "list"),
        ("", "pods", "list"),
        ("dljob.dev", "dlprofiles", "list"),
        ("", "persistentvolumeclaims", "get"),
        ("", "persistentvolumes", "get"),
        ("storage.k8s.io", "storageclasses", "list"),
    }
    assert not any(label.startswith("rbac.authorization.k8s.io/") for label in role["metadata"]["labels"])
    bound = [*of_kind(objects, "ClusterRoleBinding"), *of_kind(objects, "RoleBinding")]
    assert "dljob-plan" not in {binding["roleRef"]["name"] for binding in bound}
