"""The admission policy of the chart on a real API server, with users who may and may not create pods."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dljob.api.overrides import admission_policy
from support.cluster.kubectl import ROOT, Kubectl, KubectlError, wait_for
from support.cluster.live_job import SPEC
from support.override_cases import SAFE, UNSAFE

pytestmark = pytest.mark.api
Json = dict[str, Any]
ANNOTATION = {"dljob.dev/overrides": "all"}


class User:
    """A user of the namespace, who may edit DLJobs and perhaps create pods."""

    def __init__(self, kubectl: Kubectl, name: str, *, pods: bool) -> None:
        self.kubectl, self.name = kubectl, name
        rules = [{"apiGroups": ["dljob.dev"], "resources": ["dljobs", "dljobs/scale"], "verbs": ["*"]}]
        rules += [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}] if pods else []
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        subjects = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}]
        kubectl.apply(
            {**role, "kind": "Role", "rules": rules},
            {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": subjects},
        )

    def run(self, *args: str, stdin: str | None = None) -> str:
        return self.kubectl.run(f"--as={self.name}", *args, stdin=stdin)

    def apply(
        self, name: str, pod: Json, annotations: Json | None = None, flags: tuple[str, ...] = (), **spec: Any
    ) -> None:
        overrides = [{"manager": "me", "spec": pod}]
        job = {
            "apiVersion": "dljob.dev/v1alpha1",
            "kind": "DLJob",
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": {**SPEC, "suspend": True, "podTemplateOverrides": overrides, **spec},
        }
        self.run("apply", "--server-side", *flags, "-f", "-", stdin=yaml.safe_dump(job))


@pytest.fixture(scope="module")
def policy(kubectl: Kubectl) -> Iterator[None]:
    name = f"overrides-{kubectl.namespace}"
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    only_here = {"matchLabels": {"kubernetes.io/metadata.name": kubectl.namespace}}
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": only_here},
    }
    kubectl.apply(
        {**api, "kind": "ValidatingAdmissionPolicy", "spec": admission_policy()},
        {**api, "kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    )
    intern = User(kubectl, "probe", pods=False)

    def in_force() -> bool:
        try:
            intern.apply("probe", {"hostPID": True}, flags=("--dry-run=server",))
        except KubectlError as error:
            return "dljob.dev/overrides" in str(error)
        return False

    wait_for("the policy to be in force", in_force, 30)
    yield
    for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
        kubectl.delete(kind, name)


@pytest.fixture(scope="module")
def intern(kubectl: Kubectl, policy: None) -> User:
    return User(kubectl, "intern", pods=False)


@pytest.fixture(scope="module")
def engineer(kubectl: Kubectl, policy: None) -> User:
    return User(kubectl, "engineer", pods=True)


def test_policy_agrees_with_the_python_rule(intern: User) -> None:
    for i, case in enumerate(SAFE):
        intern.apply(f"safe-{i}", SAFE[case])
    for i, case in enumerate(UNSAFE):
        with pytest.raises(KubectlError, match="denied request"):
            intern.apply(f"unsafe-{i}", UNSAFE[case][0])


def test_only_who_may_create_pods_may_use_more(intern: User, engineer: User) -> None:
    pod = {"hostPID": True}
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.apply("more", pod, ANNOTATION)
    with pytest.raises(KubectlError, match=r"dljob\.dev/overrides"):
        engineer.apply("more", pod)  # The annotation says that it is on purpose.
    engineer.apply("more", pod, ANNOTATION)


def test_queues_and_autoscalers_may_update_such_a_job(intern: User, engineer: User) -> None:
    engineer.apply("shared", {"hostPID": True}, ANNOTATION)
    intern.run("patch", "dljob", "shared", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    intern.run("patch", "dljob", "shared", "--type=merge", "-p", '{"spec": {"nodes": {"max": 3}}}')
    intern.run("label", "dljob", "shared", "queue=a")
    intern.run("scale", "dljob", "shared", "--replicas=2")
    for change in ('{"trainer": {"image": "mine"}}', '{"podTemplateOverrides": []}', '{"dataset": {"name": "wine"}}'):
        with pytest.raises(KubectlError, match="may not create pods"):
            intern.run("patch", "dljob", "shared", "--type=merge", "-p", f'{{"spec": {change}}}')


def test_annotation_cannot_be_added_later(intern: User) -> None:
    intern.apply("later", {})
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.run("annotate", "dljob", "later", "dljob.dev/overrides=all")


def test_job_from_before_the_policy_can_still_be_updated(kubectl: Kubectl, intern: User, engineer: User) -> None:
    """A job that has unsafe overrides without the annotation can be suspended, but not given others."""
    engineer.apply("before", {"hostPID": True}, ANNOTATION)
    kubectl.run("patch", "dljob", "before", "--type=merge", "-p", '{"metadata": {"labels": {"a": "b"}}}')
    intern.run("patch", "dljob", "before", "--type=merge", "-p", '{"spec": {"suspend": false}}')


def test_chart_installs_this_policy() -> None:
    text = (ROOT / "charts/dljob/files/override-policy.yaml").read_text()
    assert yaml.safe_load(text) == admission_policy()
