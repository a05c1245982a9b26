"""Refuse jobs whose overrides or Secrets the installation does not allow (chart value ``overrides``).

``api/overrides.py`` says which fields are safe. The chart's ValidatingAdmissionPolicy reserves the annotation that
allows the others. A job may be older than the policy, and the policy cannot read Secrets, so the operator checks too.
"""

from collections.abc import Mapping

from dljob.api import DLJobSpec
from dljob.api.overrides import SECRET_LABEL, UNSAFE_MESSAGE, OverridePolicy, secrets, unsafe_fields
from dljob.status import FALSE, Verdict


def refused_override(spec: DLJobSpec, may_override: bool, policy: OverridePolicy) -> Verdict | None:
    """Return Accepted=False if the spec has pod template overrides that the installation does not allow; else None.

    ``may_override``: True if the job has the annotation ``dljob.dev/overrides: all``.
    """
    if policy is OverridePolicy.NONE and spec.pod_template_overrides:
        text = (
            f"spec.podTemplateOverrides: found {len(spec.pod_template_overrides)} entries; expected no entries, "
            "because the chart value overrides is none. Remove the entries, or ask the administrator to allow "
            "overrides"
        )
        return Verdict("Accepted", FALSE, "OverridesNotAllowed", text)
    if policy.unlimited(annotated=may_override) or not (unsafe := unsafe_fields(spec)):
        return None
    more = f" and {len(unsafe) - 1} more" if len(unsafe) > 1 else ""
    return Verdict("Accepted", FALSE, "OverridesNotAllowed", f"{UNSAFE_MESSAGE} (not allowed: {unsafe[0]}{more})")


def refused_secret(spec: DLJobSpec, usable: Mapping[str, bool]) -> Verdict | None:
    """Return Accepted=False if the spec names a Secret that jobs may not use; else None.

    The controller calls this only if the policy is not unlimited for the job (``OverridePolicy.unlimited``).
    ``usable``: for each existing Secret, by name, True if it has the label that lets jobs use it;
    ``Kube.usable_secrets`` (``kube/client.py``) reads the labels. A Secret that does not exist may not be used either,
    because it could be created without the label.
    """
    for use in secrets(spec):
        if not usable.get(use.name, False):
            exists = use.name in usable
            problem = (
                f"{use.field}: found {'' if exists else 'no '}Secret "
                f"{use.name!r}{' without this label' if exists else ''}; expected a Secret with the label "
                f"{SECRET_LABEL}=true. {'' if exists else 'Create the Secret. '}A user who may edit the Secret can "
                f"add the label: kubectl label secret {use.name} {SECRET_LABEL}=true"
            )
            return Verdict("Accepted", FALSE, "SecretNotUsable", problem)
    return None
