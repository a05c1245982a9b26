"""Users of a namespace without the permissions of an administrator, and the admission policy that limits them."""

import json
from typing import Any

from dljob.api.overrides import ANNOTATION_MESSAGE, NEW_ANNOTATION_MESSAGE, OverridePolicy, admission_policy
from support.cluster.kubectl import Kubectl, KubectlError, refusals, wait_for
from support.cluster.live_job import SPEC
from support.cluster.objects import objects_of

Json = dict[str, Any]
ANNOTATION = {"dljob.dev/overrides": "all"}
UNSAFE_POD = {"hostPID": True}
_KINDS = ("validatingadmissionpolicybinding", "validatingadmissionpolicy")


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
        # The API server learns of a binding by a watch.
        wait_for(f"{name} to have permissions", lambda: f'User "{name}" cannot' not in self.refusal({}), 30)

    def run(self, *args: str, stdin: str | None = None) -> str:
        return self.kubectl.run(f"--as={self.name}", *args, stdin=stdin)

    def apply(
        self,
        name: str,
        pod: Json,
        annotations: Json | None = None,
        *,
        force: bool = False,
        dry_run: bool = False,
        **spec: Any,
    ) -> None:
        """Apply a suspended job with ``pod`` as its override, unless ``spec`` has others."""
        job = suspended(name, annotations, **{"podTemplateOverrides": [{"manager": "me", "spec": pod}], **spec})
        objects, namespace = objects_of(self.kubectl.kubeconfig), self.kubectl.namespace
        with refusals():
            objects.apply(job, namespace, self.name, force=force, dry_run=dry_run)

    def patch(self, name: str, change: str) -> None:
        """Change the spec of a job. ``change``: a merge patch of the spec in JSON."""
        with refusals():
            objects_of(self.kubectl.kubeconfig).patch(
                "dljob", self.kubectl.namespace, name, {"spec": json.loads(change)}, user=self.name
            )

    def refusal(self, pod: Json, annotations: Json | None = None) -> str:
        """Return why the API server would refuse a new job of this user; empty if it would not."""
        try:
            self.apply("probe", pod, annotations, dry_run=True)
        except KubectlError as error:
            return str(error)
        return ""


def suspended(name: str, annotations: Json | None = None, **spec: Any) -> Json:
    """Return a suspended job."""
    return {
        "apiVersion": "dljob.dev/v1alpha1",
        "kind": "DLJob",
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {**SPEC, "suspend": True, **spec},
    }


def install_policy(kubectl: Kubectl, policy: OverridePolicy, intern: User) -> None:
    """Install the chart's admission policy for a namespace, and wait until it limits ``intern``."""
    name = _name(kubectl)
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    only_here = {"matchLabels": {"kubernetes.io/metadata.name": kubectl.namespace}}
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": only_here},
    }
    kubectl.apply(
        {**api, "kind": "ValidatingAdmissionPolicy", "spec": admission_policy(policy)},
        {**api, "kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    )
    message = NEW_ANNOTATION_MESSAGE if policy is OverridePolicy.ALL else ANNOTATION_MESSAGE

    def in_force() -> bool:
        limits_overrides = bool(intern.refusal(UNSAFE_POD))
        return limits_overrides is (policy is OverridePolicy.SAFE) and message in intern.refusal({}, ANNOTATION)

    wait_for(f"the policy for {policy} to be in force", in_force, 30)


def remove_policy(kubectl: Kubectl) -> None:
    for kind in _KINDS:
        kubectl.delete(kind, _name(kubectl))


def _name(kubectl: Kubectl) -> str:
    return f"overrides-{kubectl.namespace}"
