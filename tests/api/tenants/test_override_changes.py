"""The admission policies of all values of ``overrides``, one after another in one namespace of a real API server."""

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from dljob.api.overrides import OverridePolicy
from support.cluster.kubectl import ROOT, Kubectl, KubectlError
from support.cluster.users import ANNOTATION, UNSAFE_POD, User, install_policy, remove_policy

pytestmark = pytest.mark.api
LISTED = re.compile(r"^kubectl (get dljobs -A .*)$", re.MULTILINE)
"""The command by which docs/security.md lists jobs with the annotation."""
CODE_CHANGE = '{"trainer": {"image": "mine"}}'


@pytest.fixture(scope="module")
def users(kubectl: Kubectl) -> Iterator[tuple[User, User]]:
    """Return a user who may not create pods and one who may."""
    yield User(kubectl, "intern", pods=False), User(kubectl, "engineer", pods=True)
    remove_policy(kubectl)


@pytest.mark.parametrize("policy", OverridePolicy)
def test_annotation_is_reserved_under_every_value(
    policy: OverridePolicy, kubectl: Kubectl, users: tuple[User, User]
) -> None:
    """Fixed bug: everybody could set it under ``none`` and ``all``, and it counted after a change to ``safe``."""
    intern, engineer = users
    install_policy(kubectl, policy, intern)
    theirs, mine = f"theirs-{policy}", f"mine-{policy}"
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.apply(theirs, {}, ANNOTATION)
    intern.apply(theirs, {})
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.run("annotate", "dljob", theirs, "dljob.dev/overrides=all")
    engineer.apply(mine, UNSAFE_POD, ANNOTATION)
    intern.patch(mine, '{"suspend": false}')


def test_all_limits_nothing_but_the_annotation(kubectl: Kubectl, users: tuple[User, User]) -> None:
    intern, engineer = users
    install_policy(kubectl, OverridePolicy.ALL, intern)
    intern.apply("free", UNSAFE_POD)
    intern.patch("free", CODE_CHANGE)
    engineer.apply("annotated", UNSAFE_POD, ANNOTATION)
    intern.patch("annotated", CODE_CHANGE)
    intern.patch("annotated", '{"podTemplateOverrides": []}')
    intern.run("annotate", "dljob", "annotated", "dljob.dev/overrides-")


def test_none_lets_nobody_prepare_an_annotated_job(kubectl: Kubectl, users: tuple[User, User]) -> None:
    """What the pods of such a job run counts after a change to ``safe``."""
    intern, engineer = users
    install_policy(kubectl, OverridePolicy.NONE, intern)
    engineer.apply("prepared", {}, ANNOTATION)
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.patch("prepared", CODE_CHANGE)


@pytest.mark.parametrize("changed", [{"volume": {"claimName": "mine"}}, {"uri": "s3://mine/files"}], ids=str)
def test_safe_reserves_the_place_of_checkpoints(
    changed: dict[str, object], kubectl: Kubectl, users: tuple[User, User]
) -> None:
    """A script may load a checkpoint with pickle, which runs code that is in the file."""
    intern, engineer = users
    install_policy(kubectl, OverridePolicy.SAFE, intern)
    name = f"restores-{len(str(changed))}"
    engineer.apply(name, UNSAFE_POD, ANNOTATION)
    with pytest.raises(KubectlError, match="may not create pods"):
        intern.patch(name, json.dumps({"checkpoint": changed}))
    intern.patch(name, '{"checkpoint": {"interval": "90s"}}')
    engineer.patch(name, json.dumps({"checkpoint": changed}))


def test_documented_command_lists_annotated_jobs(kubectl: Kubectl, users: tuple[User, User]) -> None:
    intern, engineer = users
    install_policy(kubectl, OverridePolicy.SAFE, intern)
    intern.apply("without", {})
    engineer.apply("other-value", {}, {"dljob.dev/overrides": "none"})
    engineer.apply("with", {}, ANNOTATION)
    found = LISTED.search((ROOT / "docs/security.md").read_text())
    assert found is not None
    lines = kubectl.run(*shlex.split(found[1])).splitlines()
    mine = {name for namespace, name in (line.split() for line in lines) if namespace == kubectl.namespace}
    assert "with" in mine and not mine & {"without", "other-value"}
