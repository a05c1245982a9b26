"""Tests that the controller starts a job only if its pods may read the Secrets that the spec names."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.api.overrides import OVERRIDES_ANNOTATION, SECRET_LABEL, OverridePolicy
from dljob.kube import JobKey
from dljob.kube.kinds import SECRET
from dljob.render import Names
from support.builders import CONFIG
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster

Json = dict[str, Any]
NAME = "payroll"
USES: dict[str, tuple[Json, str]] = {
    # name: (part of the spec, field that the message names)
    "variable": (
        {"trainer": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": NAME, "key": "k"}}}]}},
        "spec.trainer.env[0].valueFrom.secretKeyRef.name",
    ),
    "environment": (
        {"trainer": {"envFrom": [{"prefix": "A_", "secretRef": {"name": NAME}}]}},
        "spec.trainer.envFrom[0].secretRef.name",
    ),
    "checkpoints": ({"checkpoint": {"uri": "s3://models/a", "secretName": NAME}}, "spec.checkpoint.secretName"),
    "data": (
        {"dataset": {"uri": "https://example.invalid/a.npz", "samples": 100, "secretName": NAME}},
        "spec.dataset.secretName",
    ),
}
ANNOTATION = {OVERRIDES_ANNOTATION: "all"}
NONE, SAFE, ALL = OverridePolicy.NONE, OverridePolicy.SAFE, OverridePolicy.ALL


def pods_may_run(operator: Operator, key: JobKey) -> bool:
    sets = [name for plural, namespace, name in operator.cluster.api.objects if plural == "statefulsets"]
    return any(name.startswith(f"{key[1]}-") for name in sets)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("policy", "annotations", "marked", "allowed"),
    [
        (NONE, {}, False, False),
        (NONE, ANNOTATION, False, False),
        (NONE, {}, True, True),
        (SAFE, {}, False, False),
        (SAFE, {}, True, True),
        (SAFE, ANNOTATION, False, True),
        (ALL, {}, False, True),
    ],
)
def test_secret_without_the_mark_is_refused(
    use: str, policy: OverridePolicy, annotations: Json, marked: bool, allowed: bool
) -> None:
    """Fixed bug: with ``overrides: none``, everybody could set the annotation and then read every Secret."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.secret(NAME, **({SECRET_LABEL: "true"} if marked else {}))
        key = cluster.submit("reader", annotations=annotations, **{**SPEC, **USES[use][0]})
        await operator.watch()
        assert pods_may_run(operator, key) is allowed
        if not allowed:
            assert operator.condition(key, "Accepted") == ("False", "SecretNotUsable")
            assert USES[use][1] in operator.message(key, "Accepted")

    on_two_nodes(body, config=replace(CONFIG, overrides=policy))


def test_job_waits_until_the_secret_has_the_mark() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.secret(NAME)
        key = cluster.submit("reader", **{**SPEC, **USES["variable"][0]})
        await operator.watch()
        assert not pods_may_run(operator, key)
        cluster.secret(NAME, **{SECRET_LABEL: "true"})
        operator.queue.add(key)
        await operator.watch()
        assert pods_may_run(operator, key)

    on_two_nodes(body, config=replace(CONFIG, overrides=SAFE))


def test_keys_of_another_owner_are_not_used() -> None:
    """Fixed bug: who knows the uid of a waiting job could create its Secret, and so know the keys of its agents."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("waits", suspend=True, **SPEC)
        await operator.watch()
        job = operator.cache.job(key)
        assert job is not None
        cluster.secret(Names.of(job).secret)
        await cluster.edit(key, suspend=False)
        await operator.watch()
        assert operator.condition(key, "PodsReady") == ("False", "NamesTaken")
        assert Names.of(job).secret in operator.message(key, "PodsReady") and not pods_may_run(operator, key)
        await cluster.api.delete(SECRET, key[0], Names.of(job).secret)
        await operator.watch(30.0)
        assert pods_may_run(operator, key)

    on_two_nodes(body)


def test_job_waits_for_the_deletion_of_the_secret_of_an_earlier_job_of_its_name() -> None:
    """Fixed bug: the new job warned of another owner, and looked again after 10 s only."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("waits", suspend=True, **SPEC)
        await operator.watch()
        job = operator.cache.job(key)
        assert job is not None
        name = Names.of(job).secret
        cluster.secret(name)
        earlier = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "name": "waits", "uid": "e", "controller": True}
        cluster.api.objects[SECRET.plural, key[0], name]["metadata"]["ownerReferences"] = [earlier]
        await cluster.edit(key, suspend=False)
        await operator.watch()
        assert operator.condition(key, "PodsReady") == ("False", "WaitingForDeletion")
        assert name in operator.message(key, "PodsReady") and not pods_may_run(operator, key)
        await cluster.api.delete(SECRET, key[0], name)
        await operator.watch()
        assert pods_may_run(operator, key)

    on_two_nodes(body)


def test_only_the_secrets_up_to_the_first_refused_one_are_read() -> None:
    """A spec can name a thousand Secrets, and a job that waits for one of them is reconciled again and again."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.secret("s0", **{SECRET_LABEL: "true"})
        cluster.secret("s2", **{SECRET_LABEL: "true"})
        sources = [{"secretRef": {"name": f"s{i}"}} for i in range(30)]
        key = cluster.submit("reader", **SPEC, trainer={"envFrom": sources})
        await operator.watch()
        assert operator.condition(key, "Accepted") == ("False", "SecretNotUsable")
        assert "envFrom[1]" in operator.message(key, "Accepted")
        assert set(cluster.api.looked_at) == {"s0", "s1"}

    on_two_nodes(body, config=replace(CONFIG, overrides=SAFE))
