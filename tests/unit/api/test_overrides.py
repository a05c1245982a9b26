"""Tests of which pod template overrides are safe; tests/api holds the admission policy to the same table."""

import pytest

from dljob.api import DLJobSpec
from dljob.api.overrides import (
    SAFE_ENV_OBJECTS,
    SAFE_ENV_SOURCES,
    OverridePolicy,
    SecretUse,
    admission_policy,
    secrets,
    unsafe_fields,
)
from dljob.api.spec.environment import EnvFrom, EnvSource
from dljob.reconcile import parse_observed, with_secrets
from support.builders import DIGITS, job, seen
from support.override_cases import SAFE, SAFE_ANNOTATIONS, UNSAFE, UNSAFE_ANNOTATIONS, Json, annotated


def spec(pod: Json, **more: object) -> Json:
    return {**DIGITS, "podTemplateOverrides": [{"manager": "me", "spec": pod}], **more}


@pytest.mark.parametrize("case", SAFE)
def test_safe_overrides_are_for_everybody(case: str) -> None:
    assert unsafe_fields(DLJobSpec.model_validate(spec(SAFE[case]))) == ()


@pytest.mark.parametrize("case", UNSAFE)
def test_unsafe_overrides_name_the_field(case: str) -> None:
    pod, path = UNSAFE[case]
    found = unsafe_fields(DLJobSpec.model_validate(spec(pod)))
    assert any(field.startswith("spec.podTemplateOverrides[0].spec.") and field.endswith(path) for field in found)


def test_overrides_and_trainer_accept_the_same_sources_of_variables() -> None:
    """Fixed bug: overrides refused ConfigMaps, which spec.trainer.env and spec.trainer.envFrom may name."""
    assert {field.alias for field in EnvSource.model_fields.values()} == set(SAFE_ENV_SOURCES)
    assert {field.alias for field in EnvFrom.model_fields.values()} == {"prefix", *SAFE_ENV_OBJECTS}


@pytest.mark.parametrize("names", [SAFE_ENV_SOURCES, ("prefix", *SAFE_ENV_OBJECTS)], ids=["env", "envFrom"])
def test_admission_policy_has_the_same_sources_of_variables(names: tuple[str, ...]) -> None:
    """``tests/api`` evaluates the policy: the CEL library of the unit tests has no optional fields."""
    safe = admission_policy(OverridePolicy.SAFE)["validations"][0]["expression"]
    assert f"k in [{', '.join(map(repr, names))}]" in safe


@pytest.mark.parametrize("key", SAFE_ANNOTATIONS)
def test_other_annotations_are_for_everybody(key: str) -> None:
    assert unsafe_fields(DLJobSpec.model_validate({**DIGITS, "podTemplateOverrides": [annotated(key)]})) == ()


@pytest.mark.parametrize("key", UNSAFE_ANNOTATIONS)
def test_annotations_that_lower_security_are_unsafe(key: str) -> None:
    spec = DLJobSpec.model_validate({**DIGITS, "podTemplateOverrides": [annotated(key)]})
    assert unsafe_fields(spec) == (f"spec.podTemplateOverrides[0].metadata.annotations[{key}]",)


@pytest.mark.parametrize(
    ("policy", "pod", "marked", "reason"),
    [
        (OverridePolicy.NONE, {}, True, "OverridesNotAllowed"),
        (OverridePolicy.SAFE, {"nodeSelector": {}}, False, None),
        (OverridePolicy.SAFE, {"hostPID": True}, False, "OverridesNotAllowed"),
        (OverridePolicy.SAFE, {"hostPID": True}, True, None),
        (OverridePolicy.ALL, {"hostPID": True}, False, None),
    ],
)
def test_installation_decides_what_overrides_may_contain(
    policy: OverridePolicy, pod: Json, marked: bool, reason: str | None
) -> None:
    observed = seen(spec(pod))
    parsed = parse_observed(type(observed)(job=job(spec(pod), may_override=marked)), policy)
    assert (parsed.refusal.reason if parsed.refusal else None) == reason
    assert (parsed.spec is None) == (reason is not None)


@pytest.mark.parametrize("policy", OverridePolicy)
@pytest.mark.parametrize("marked", [True, False])
def test_annotation_counts_only_under_safe(policy: OverridePolicy, marked: bool) -> None:
    expected = {OverridePolicy.NONE: False, OverridePolicy.SAFE: marked, OverridePolicy.ALL: True}
    assert policy.unlimited(annotated=marked) is expected[policy]


def test_all_uses_of_secrets_are_found() -> None:
    data = {"uri": "s3://a/b.npz", "samples": 100, "secretName": "one"}
    cases = ("secret volume", "secret variable", "secret environment")
    overrides = [{"manager": case, "spec": SAFE[case]} for case in cases]
    found = secrets(DLJobSpec.model_validate({**DIGITS, "dataset": data, "podTemplateOverrides": overrides}))
    assert found[0] == SecretUse("spec.dataset.secretName", "one")
    assert [use.name for use in found[1:]] == ["marked"] * 3
    assert found[2].field == "spec.podTemplateOverrides[1].spec.containers[0].env[0].valueFrom.secretKeyRef.name"


def test_secret_for_checkpoints_is_found() -> None:
    stored = {"uri": "s3://models/a", "secretName": "one"}
    found = secrets(DLJobSpec.model_validate({**DIGITS, "checkpoint": stored}))
    assert found == (SecretUse("spec.checkpoint.secretName", "one"),)
    assert not secrets(DLJobSpec.model_validate({**DIGITS, "checkpoint": {**stored, "enabled": False}}))


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"git": {"url": "https://a/b", "revision": "0" * 40, "secretName": "one"}}, "git.secretName"),
        ({"archive": {"uri": "s3://a/b.zip", "secretName": "one"}}, "archive.secretName"),
    ],
    ids=["git", "archive"],
)
def test_secret_for_a_script_is_found(source: Json, field: str) -> None:
    trainer = {"command": ["python", "a.py"], "source": source}
    found = secrets(DLJobSpec.model_validate({**DIGITS, "trainer": trainer}))
    assert found == (SecretUse(f"spec.trainer.source.{field}", "one"),)


def test_secrets_of_variables_are_found() -> None:
    env = [
        {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "one", "key": "k"}}},
    ]
    trainer = {"env": env, "envFrom": [{"configMapRef": {"name": "c"}}, {"secretRef": {"name": "two"}}]}
    assert secrets(DLJobSpec.model_validate({**DIGITS, "trainer": trainer})) == (
        SecretUse("spec.trainer.env[1].valueFrom.secretKeyRef.name", "one"),
        SecretUse("spec.trainer.envFrom[1].secretRef.name", "two"),
    )


@pytest.mark.parametrize(
    ("usable", "words"),
    [({"marked": True}, None), ({"marked": False}, "without this label"), ({}, "found no Secret")],
)
def test_secret_needs_the_mark_of_its_owner(usable: dict[str, bool], words: str | None) -> None:
    parsed = with_secrets(parse_observed(seen(spec(SAFE["secret volume"]))), usable)
    assert (parsed.spec is None) == (words is not None)
    if words is not None:
        assert parsed.refusal is not None and parsed.refusal.reason == "SecretNotUsable"
        assert words in parsed.refusal.message
        assert "kubectl label secret marked dljob.dev/usable=true" in parsed.refusal.message


@pytest.mark.parametrize("policy", [OverridePolicy.NONE, OverridePolicy.SAFE])
@pytest.mark.parametrize("field", ["dataset", "checkpoint.?secretName", "checkpoint.?uri", "checkpoint.?volume"])
def test_only_who_may_create_pods_changes_from_where_an_annotated_job_reads(policy: OverridePolicy, field: str) -> None:
    """Fixed bug: everybody could let its pods restore other files, which a script may load with pickle."""
    [same] = [item["expression"] for item in admission_policy(policy)["variables"] if item["name"] == "same"]
    assert f"oldObject.spec.?{field} == object.spec.?{field}" in same
