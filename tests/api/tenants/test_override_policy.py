"""The admission policy of the chart on a real API server, with users who may and may not create pods."""

from collections.abc import Iterator

import pytest

from dljob.api.overrides import OverridePolicy
from support.cluster.kubectl import Kubectl, KubectlError
from support.cluster.users import ANNOTATION, UNSAFE_POD, User, install_policy, remove_policy, suspended
from support.override_cases import SAFE, SAFE_ANNOTATIONS, UNSAFE, UNSAFE_ANNOTATIONS, annotated

pytestmark = pytest.mark.api
CODE_CHANGES = (
    '{"trainer": {"image": "mine"}}', '{"dataset": {"name": "wine"}}', '{"model": {"name": "mlp"}}',
    '{"scheduling": {"nodeSelector": {"a": "b"}}}',
)  # fmt: skip
"""Changes of what the pods of a job run."""


@pytest.fixture(scope="module")
def before(kubectl: Kubectl) -> str:
    """Return the name of a job with unsafe overrides and no annotation, which exists before the policy."""
    overrides = [{"manager": "me", "spec": UNSAFE_POD}]
    kubectl.apply(suspended("before", podTemplateOverrides=overrides))
    return "before"


@pytest.fixture(scope="module")
def policy(kubectl: Kubectl, before: str) -> Iterator[None]:
    install_policy(kubectl, OverridePolicy.SAFE, User(kubectl, "probe", pods=False))
    yield
    remove_policy(kubectl)


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
    for i, key in enumerate(SAFE_ANNOTATIONS):
        intern.apply(f"safe-annotation-{i}", {}, podTemplateOverrides=[annotated(key)])
    for i, key in enumerate(UNSAFE_ANNOTATIONS):
        with pytest.raises(KubectlError, match="denied request"):
            intern.apply(f"unsafe-annotation-{i}", {}, podTemplateOverrides=[annotated(key)])


def test_only_who_may_create_pods_may_use_more(intern: User, engineer: User) -> None:
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.apply("more", UNSAFE_POD, ANNOTATION)
    with pytest.raises(KubectlError, match=r"dljob\.dev/overrides"):
        engineer.apply("more", UNSAFE_POD)  # The annotation says that it is on purpose.
    engineer.apply("more", UNSAFE_POD, ANNOTATION)


def test_queues_and_autoscalers_may_update_such_a_job(intern: User, engineer: User) -> None:
    engineer.apply("shared", UNSAFE_POD, ANNOTATION)
    intern.patch("shared", '{"suspend": false}')
    intern.patch("shared", '{"nodes": {"max": 3}}')
    intern.run("label", "dljob", "shared", "queue=a")
    intern.run("scale", "dljob", "shared", "--replicas=2")
    for change in (*CODE_CHANGES, '{"podTemplateOverrides": []}'):
        with pytest.raises(KubectlError, match="may not create pods"):
            intern.patch("shared", change)


def test_annotation_cannot_be_added_later(intern: User) -> None:
    intern.apply("later", {})
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.run("annotate", "dljob", "later", "dljob.dev/overrides=all")


def test_job_from_before_the_policy_can_still_be_updated(before: str, intern: User) -> None:
    """A job that has unsafe overrides without the annotation can be suspended, but not changed otherwise."""
    intern.run("label", "dljob", before, "a=b")
    intern.patch(before, '{"suspend": false}')
    for change in (*CODE_CHANGES, '{"podTemplateOverrides": [{"manager": "me", "spec": {"hostIPC": true}}]}'):
        with pytest.raises(KubectlError, match="found fields that are not allowed"):
            intern.patch(before, change)
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.run("annotate", "dljob", before, "dljob.dev/overrides=all")
    intern.patch(before, '{"podTemplateOverrides": []}')
    for change in CODE_CHANGES:
        intern.patch(before, change)
