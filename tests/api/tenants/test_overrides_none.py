"""An operator with ``overrides: none`` on a real API server: the annotation for more overrides has no effect."""

from typing import Any

import pytest

from support.cluster.kubectl import wait_for
from support.cluster.live_job import Play
from support.cluster.users import ANNOTATION

pytestmark = pytest.mark.api
Json = dict[str, Any]
TRAINER: dict[str, Json] = {
    "variable": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "payroll", "key": "a"}}}]},
    "environment": {"envFrom": [{"secretRef": {"name": "payroll"}}]},
}


@pytest.fixture(scope="module")
def operator_environment() -> dict[str, str]:
    return {"DLJOB_OVERRIDES": "none"}


@pytest.mark.long
def test_annotation_opens_neither_secrets_nor_overrides(play: Play) -> None:
    """Fixed bug: everybody could set the annotation and read every Secret of the namespace."""
    kubectl = play.kubectl
    kubectl.run("create", "secret", "generic", "payroll", "--from-literal=a=b")
    for name, trainer in TRAINER.items():
        play.submit(name, ANNOTATION, trainer=trainer)
    data = {"uri": "https://example.invalid/a.npz", "samples": 100, "secretName": "payroll"}
    play.submit("data", ANNOTATION, dataset=data)
    play.submit("override", ANNOTATION, podTemplateOverrides=[{"manager": "me", "metadata": {"labels": {"a": "b"}}}])
    for name in (*TRAINER, "data"):
        play.until_reported(name, "Accepted", "SecretNotUsable", "payroll")
    play.until_reported("override", "Accepted", "OverridesNotAllowed")
    assert not kubectl.list("statefulsets", "dljob.dev/job")
    kubectl.run("label", "secret", "payroll", "dljob.dev/usable=true")
    for name in TRAINER:
        wait_for(f"the pods of {name}", lambda name=name: kubectl.list("pods", f"dljob.dev/job={name}"), 90)
        kubectl.delete("dljob", name)
