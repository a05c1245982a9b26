"""Pod template overrides that anybody may use, and those that only users who may create pods in the namespace may use.

The operator creates pods with its own permissions. A free-form override would give everybody who may create a DLJob a
pod with any host path, service account or Secret. The constants ``SAFE_*`` list the safe fields. All other fields need
the annotation ``OVERRIDES_ANNOTATION``, which a ValidatingAdmissionPolicy reserves for users who may create pods. Safe
fields may name Secrets with the label ``SECRET_LABEL`` only. ``reconcile/spec/overrides_policy.py`` refuses all others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dljob.api.base import GROUP, VERSION
from dljob.api.spec import DLJobSpec

OVERRIDES_ANNOTATION = f"{GROUP}/overrides"
"""Annotation of a DLJob. With the value ``ALL_OVERRIDES``, and if the chart value ``overrides`` is ``safe``,
``spec.podTemplateOverrides`` may contain any field, and the pods may use any Secret of the namespace."""
ALL_OVERRIDES = "all"
SECRET_LABEL = f"{GROUP}/usable"
"""Label of a Secret. With the value ``true``, the DLJobs of its namespace may use the Secret."""

SAFE_POD_FIELDS = (
    "nodeSelector", "tolerations", "affinity", "runtimeClassName", "schedulerName", "containers", "volumes",
)  # fmt: skip
SAFE_CONTAINER_FIELDS = ("name", "resources", "volumeMounts", "env", "envFrom")
SAFE_ENV_SOURCES = ("secretKeyRef", "configMapKeyRef", "fieldRef")
SAFE_ENV_OBJECTS = ("secretRef", "configMapRef")
"""Sources of environment variables, those of ``spec.trainer.env`` and of ``spec.trainer.envFrom``."""
SAFE_VOLUMES = ("configMap", "emptyDir", "persistentVolumeClaim", "secret")
TRAINER_CONTAINER = "trainer"
UNSAFE_ANNOTATIONS = (
    "container.apparmor.security.beta.kubernetes.io/", "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)  # fmt: skip
"""Prefixes of pod annotations that select an AppArmor or seccomp profile, and can therefore switch it off."""


class OverridePolicy(StrEnum):
    """The installation's setting of what ``spec.podTemplateOverrides`` may contain (chart value ``overrides``).

    NONE: nothing. SAFE: the safe fields, or all fields in a job with ``OVERRIDES_ANNOTATION``. ALL: all fields.
    """

    NONE = "none"
    SAFE = "safe"
    ALL = "all"

    def unlimited(self, *, annotated: bool) -> bool:
        """Return True if a job may contain any override and use any Secret of its namespace.

        ``annotated``: True if the job has ``OVERRIDES_ANNOTATION`` with the value ``ALL_OVERRIDES``. The annotation has
        an effect only under ``SAFE``.
        """
        return self is OverridePolicy.ALL or (self is OverridePolicy.SAFE and annotated)


@dataclass(frozen=True)
class SecretUse:
    """A Secret whose content the pods of a job can read.

    ``name``: name of the Secret. ``field``: path of the DLJob field that contains this name, for messages.
    """

    field: str
    name: str


def unsafe_fields(spec: DLJobSpec) -> tuple[str, ...]:
    """Return the paths of the fields in ``spec.podTemplateOverrides`` that are not allowed by OverridePolicy.SAFE."""
    found: list[str] = []
    for i, override in enumerate(spec.pod_template_overrides):
        path = f"spec.podTemplateOverrides[{i}]"
        unsafe = (key for key in override.metadata.annotations if key.startswith(UNSAFE_ANNOTATIONS))
        found += (f"{path}.metadata.annotations[{key}]" for key in unsafe)
        found += _unsafe_pod(override.spec, f"{path}.spec")
    return tuple(found)


def _unsafe_pod(pod: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from (f"{path}.{key}" for key in pod if key not in SAFE_POD_FIELDS)
    for i, container in enumerate(_maps(pod.get("containers"))):
        yield from _unsafe_container(container, f"{path}.containers[{i}]")
    for i, volume in enumerate(_maps(pod.get("volumes"))):
        yield from (f"{path}.volumes[{i}].{key}" for key in volume if key not in ("name", *SAFE_VOLUMES))
    for key in ("containers", "volumes"):
        if key in pod and not isinstance(pod[key], list):
            yield f"{path}.{key}"


def _unsafe_container(container: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from (f"{path}.{key}" for key in container if key not in SAFE_CONTAINER_FIELDS)
    if container.get("name") != TRAINER_CONTAINER:
        yield f"{path}.name"
    # A null would remove the CPU and memory of the operator, and the pod could take all memory of its node.
    if "resources" in container and not isinstance(container["resources"], Mapping):
        yield f"{path}.resources"
    for part, amounts in _map(container.get("resources")).items():
        # Extended resources have a domain. CPU and memory have fields of their own, which the planner knows.
        names = [key for key in _map(amounts) if part in ("requests", "limits") and "/" in key]
        yield from (f"{path}.resources.{part}.{key}" for key in _map(amounts) if key not in names)
        if part not in ("requests", "limits") or not isinstance(amounts, Mapping):
            yield f"{path}.resources.{part}"
    for i, variable in enumerate(_maps(container.get("env"))):
        yield from (f"{path}.env[{i}].{key}" for key in variable if key not in ("name", "value", "valueFrom"))
        sources = _map(variable.get("valueFrom"))
        yield from (f"{path}.env[{i}].valueFrom.{key}" for key in sources if key not in SAFE_ENV_SOURCES)
    for i, source in enumerate(_maps(container.get("envFrom"))):
        yield from (f"{path}.envFrom[{i}].{key}" for key in source if key not in ("prefix", *SAFE_ENV_OBJECTS))


def secrets(spec: DLJobSpec) -> tuple[SecretUse, ...]:
    """Return the Secrets whose content the pods of a job can read, except those for pulling images."""
    found = [SecretUse("spec.dataset.secretName", spec.dataset.secret_name)] if spec.dataset.secret_name else []
    if spec.checkpoint.enabled and spec.checkpoint.secret_name:
        found.append(SecretUse("spec.checkpoint.secretName", spec.checkpoint.secret_name))
    if spec.trainer.source is not None and (secret := spec.trainer.source.secret) is not None:
        found.append(SecretUse(f"spec.trainer.source.{secret[0]}", secret[1]))
    for i, own in enumerate(spec.trainer.env):
        if own.value_from is not None and (key := own.value_from.secret_key_ref) is not None:
            found += _use(f"spec.trainer.env[{i}].valueFrom.secretKeyRef.name", key.name)
    for i, given in enumerate(spec.trainer.env_from):
        if given.secret_ref is not None:
            found += _use(f"spec.trainer.envFrom[{i}].secretRef.name", given.secret_ref.name)
    for i, override in enumerate(spec.pod_template_overrides):
        path = f"spec.podTemplateOverrides[{i}].spec"
        for j, volume in enumerate(_maps(override.spec.get("volumes"))):
            found += _use(f"{path}.volumes[{j}].secret.secretName", _map(volume.get("secret")).get("secretName"))
        for j, container in enumerate(_maps(override.spec.get("containers"))):
            for k, variable in enumerate(_maps(container.get("env"))):
                reference = _map(_map(variable.get("valueFrom")).get("secretKeyRef"))
                found += _use(f"{path}.containers[{j}].env[{k}].valueFrom.secretKeyRef.name", reference.get("name"))
            for k, source in enumerate(_maps(container.get("envFrom"))):
                reference = _map(source.get("secretRef"))
                found += _use(f"{path}.containers[{j}].envFrom[{k}].secretRef.name", reference.get("name"))
    return tuple(found)


def override_variables(spec: DLJobSpec) -> Iterator[tuple[str, str, str | None]]:
    """Yield (path, name, value) of each variable that an override gives the trainer's container.

    The value is None if the variable has ``valueFrom``.
    """
    for i, override in enumerate(spec.pod_template_overrides):
        for j, container in enumerate(_maps(override.spec.get("containers"))):
            if container.get("name") != TRAINER_CONTAINER:
                continue
            for k, variable in enumerate(_maps(container.get("env"))):
                path = f"spec.podTemplateOverrides[{i}].spec.containers[{j}].env[{k}]"
                value = None if "valueFrom" in variable else str(variable.get("value", ""))
                yield path, str(variable.get("name", "")), value


def _use(field: str, name: Any) -> list[SecretUse]:
    return [SecretUse(field, name)] if isinstance(name, str) else []


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> Sequence[Mapping[str, Any]]:
    return [_map(item) for item in value] if isinstance(value, list) else []


def _cel(names: Sequence[str]) -> str:
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"


_SAFE_CEL = f"""object.spec.?podTemplateOverrides.orValue([]).all(o,
  o.?metadata.?annotations.orValue({{}}).all(k, !{_cel(UNSAFE_ANNOTATIONS)}.exists(p, k.startsWith(p))) &&
  o.?spec.orValue({{}}).all(k, k in {_cel(SAFE_POD_FIELDS)}) &&
  o.?spec.?containers.orValue([]).all(c,
    c.all(k, k in {_cel(SAFE_CONTAINER_FIELDS)}) && c.name == '{TRAINER_CONTAINER}' &&
    c.?resources.orValue({{}}).all(k, k in ['requests', 'limits']) &&
    c.?resources.?requests.orValue({{}}).all(k, k.contains('/')) &&
    c.?resources.?limits.orValue({{}}).all(k, k.contains('/')) &&
    c.?env.orValue([]).all(e, e.all(k, k in ['name', 'value', 'valueFrom']) &&
      e.?valueFrom.orValue({{}}).all(k, k in {_cel(SAFE_ENV_SOURCES)})) &&
    c.?envFrom.orValue([]).all(e, e.all(k, k in {_cel(("prefix", *SAFE_ENV_OBJECTS))}))) &&
  o.?spec.?volumes.orValue([]).all(v, v.all(k, k in {_cel(("name", *SAFE_VOLUMES))})))"""
_ASKS = (
    f"has(object.metadata.annotations) && '{OVERRIDES_ANNOTATION}' in object.metadata.annotations && "
    f"object.metadata.annotations['{OVERRIDES_ANNOTATION}'] == '{ALL_OVERRIDES}'"
)
_CODE_FIELDS = (
    "podTemplateOverrides", "trainer", "dataset", "model", "task", "scheduling", "checkpoint.?secretName",
    "checkpoint.?uri", "checkpoint.?volume",
)  # fmt: skip
"""Fields of the spec that decide what the pods run, and from where they read files.

A script may restore a checkpoint with pickle, which runs code that is in the file. The other fields of ``checkpoint``
only say how often checkpoints are written, and how many of them stay.

In a job with ``OVERRIDES_ANNOTATION``, only users who may create pods may change these fields. Other users, such as an
autoscaler, may change the remaining fields.
"""
_SAME = " && ".join(
    (
        "oldObject != null",
        f"oldObject.metadata.?annotations['{OVERRIDES_ANNOTATION}'] == "
        f"object.metadata.?annotations['{OVERRIDES_ANNOTATION}']",
        *(f"oldObject.spec.?{field} == object.spec.?{field}" for field in _CODE_FIELDS),
    )
)
_ASKED = (
    f"oldObject != null && oldObject.metadata.?annotations['{OVERRIDES_ANNOTATION}'] == optional.of('{ALL_OVERRIDES}')"
)
_MAY = "authorizer.group('').resource('pods').namespace(object.metadata.namespace).check('create').allowed()"
UNSAFE_MESSAGE = (
    "spec.podTemplateOverrides: found fields that are not allowed; expected only labels, annotations (except those "
    "of AppArmor and seccomp), nodeSelector, tolerations, affinity, runtimeClassName, schedulerName, extended "
    "resources, env, and volumes of a ConfigMap, PersistentVolumeClaim, Secret or emptyDir. Remove the other fields, "
    f"or let a user who may create pods add the annotation {OVERRIDES_ANNOTATION}: {ALL_OVERRIDES}"
)
ANNOTATION_MESSAGE = (
    f"metadata.annotations: found {OVERRIDES_ANNOTATION}: {ALL_OVERRIDES} in a request from a user who may not create "
    "pods in this namespace; expected a user who may, because the request creates the job or changes what its pods "
    "run. Remove the annotation, or ask for the permission to create pods"
)


NEW_ANNOTATION_MESSAGE = (
    f"metadata.annotations: found {OVERRIDES_ANNOTATION}: {ALL_OVERRIDES}, set by a user who may not create pods in "
    "this namespace; expected a user who may. Remove the annotation, or ask for the permission to create pods"
)


def admission_policy(policy: OverridePolicy = OverridePolicy.SAFE) -> dict[str, Any]:
    """Return the spec of the ValidatingAdmissionPolicy for a value of the chart's ``overrides``.

    The API server enforces this policy when users create or change a DLJob. For every value of ``overrides``, only
    users who may create pods may set ``OVERRIDES_ANNOTATION``, because the annotation would have its effect after a
    later change of ``overrides`` to ``SAFE``. The policy for ``SAFE`` also limits the overrides of jobs without the
    annotation to the safe fields.
    """
    safe = {
        "expression": f"variables.asks || variables.same || (\n{_SAFE_CEL})",
        "message": UNSAFE_MESSAGE,
        "reason": "Forbidden",
    }
    reserved = {
        "expression": f"!variables.asks || variables.same || {_MAY}",
        "message": ANNOTATION_MESSAGE,
        "reason": "Forbidden",
    }
    # Under ALL, every user may change every field, also in a job that somebody else has annotated.
    newly_reserved = {
        "expression": f"!variables.asks || variables.asked || {_MAY}",
        "message": NEW_ANNOTATION_MESSAGE,
        "reason": "Forbidden",
    }
    validations = {
        OverridePolicy.NONE: [reserved],
        OverridePolicy.SAFE: [safe, reserved],
        OverridePolicy.ALL: [newly_reserved],
    }
    name, expression = ("asked", _ASKED) if policy is OverridePolicy.ALL else ("same", _SAME)
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [GROUP],
                    "apiVersions": [VERSION],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["dljobs"],
                }
            ]
        },
        "variables": [{"name": "asks", "expression": _ASKS}, {"name": name, "expression": expression}],
        "validations": validations[policy],
    }


def admission_policies() -> dict[str, dict[str, Any]]:
    """Return value of the chart's ``overrides`` → spec of the ValidatingAdmissionPolicy, for all values."""
    return {str(policy): admission_policy(policy) for policy in OverridePolicy}
