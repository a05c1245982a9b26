"""The operator's rights: those of files/rbac.yaml, where it works, and no more."""

from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from dljob.job.observed import JobSeen
from dljob.render.support import _role
from support.helm_chart import CHART, of_kind, one, render

Json = dict[str, Any]
TABLE: dict[str, list[Json]] = yaml.safe_load((CHART / "files/rbac.yaml").read_text())


def rights(rules: list[Json]) -> set[tuple[str, str, str]]:
    """(API group, resource, verb) of rules."""
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def test_every_right_has_a_reason_and_none_is_a_wildcard() -> None:
    for rule in [rule for part in TABLE.values() for rule in part]:
        assert len(rule["reason"]) > 10
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_whole_cluster() -> None:
    objects = render()
    assert rights(one(objects, "ClusterRole")["rules"]) == rights(TABLE["cluster"] + TABLE["jobs"])
    assert [r["metadata"]["name"] for r in of_kind(objects, "Role")] == ["dljob-self"]
    assert rights(one(objects, "Role")["rules"]) == rights(TABLE["self"])


@pytest.mark.parametrize(
    ("values", "namespaces"),
    [({"singleNamespaceInstall": True}, {"here"}), ({"watchNamespaces": ["a", "b"]}, {"a", "b"})],
)
def test_limited_to_namespaces(values: Json, namespaces: set[str]) -> None:
    objects = render(values, namespace="here")
    assert rights(one(objects, "ClusterRole")["rules"]) == rights(TABLE["cluster"])
    roles = [r for r in of_kind(objects, "Role") if not r["metadata"]["name"].endswith("-self")]
    assert {r["metadata"]["namespace"] for r in roles} == namespaces
    assert all(rights(r["rules"]) == rights(TABLE["jobs"]) for r in roles)


def test_cluster_rights_reach_no_secret_and_no_workload() -> None:
    """Whoever limits the operator to namespaces gives nothing of the others away."""
    assert not {resource for _, resource, _ in rights(TABLE["cluster"])} & {
        "secrets", "configmaps", "statefulsets", "roles", "rolebindings", "serviceaccounts",
    }  # fmt: skip


def test_the_operator_holds_what_it_gives() -> None:
    """An API server refuses a Role with more rights than its creator has."""
    assert rights(TABLE["trainer"]) <= rights(TABLE["jobs"])


def test_agents_get_what_the_table_says() -> None:
    """The Role that the operator renders for a job is the part ``trainer`` of the table, with the job's names."""
    job = JobSeen(name="JOB", namespace="a", uid="u", generation=1, created=datetime(2026, 1, 1, tzinfo=UTC), spec={})
    rendered = _role(job)["rules"]
    expected = [{key: value for key, value in rule.items() if key != "reason"} for rule in TABLE["trainer"]]
    for rules in (rendered, expected):
        for rule in rules:
            rule["verbs"] = sorted(rule["verbs"])
    assert rendered == expected


def test_no_secret_can_be_read() -> None:
    every = [rule for part in TABLE.values() for rule in part]
    assert {verb for _, resource, verb in rights(every) if resource == "secrets"} == {"create"}


def test_bindings_name_the_account() -> None:
    objects = render({"serviceAccount": {"create": False, "name": "mine"}}, namespace="here")
    for binding in of_kind(objects, "ClusterRoleBinding") + of_kind(objects, "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "mine", "namespace": "here"}]
    assert one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert not of_kind(objects, "ServiceAccount")
