"""Attacks and accidents of one tenant, none of which may affect other owners' objects or other jobs."""

import json
import re
from typing import Any

import pytest

from dlcontract import RunPhase
from dlcontract.report import RankMeasure
from dljob.job.plan.stored import OPERATOR_KEY
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, wait_for
from support.cluster.live_job import SPEC, Play
from support.cluster.operator_process import OperatorProcess

pytestmark = pytest.mark.api
Json = dict[str, Any]

DENY: Json = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "default-deny"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}
FOREIGN: dict[str, Json] = {
    # kind: an object of somebody else, which has the name that a job needs
    "networkpolicies": DENY,
    "serviceaccounts": {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "gitlab-agent"}},
    "services": {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "frontend"},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "frontend"}},
    },
    "roles": {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "builder-agent"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}],
    },
    "rolebindings": {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "deployer-agent"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "somebody"}],
    },
    "configmaps": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "master-plan"}, "data": {"a": "b"}},
    "statefulsets": {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "crawler-DEVICE"},
        "spec": {
            "replicas": 0,
            "serviceName": "crawler",
            "selector": {"matchLabels": {"app": "crawler"}},
            "template": {
                "metadata": {"labels": {"app": "crawler"}},
                "spec": {"containers": [{"name": "main", "image": "example.invalid/other:1"}]},
            },
        },
    },
    "poddisruptionbudgets": {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "payments"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "payments"}}},
    },
    "persistentvolumeclaims": {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "database-checkpoints"},
        # Without a class, no volume is bound to it.
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "",
        },
    },
}
CHANGES: dict[str, Json] = {
    # kind: what a job needs so that it has an object of this kind
    "poddisruptionbudgets": {"scheduling": {**SPEC["scheduling"], "disruption": "Avoid"}},
    "persistentvolumeclaims": {"checkpoint": {"enabled": True}},
}


def lasting(found: Json | None) -> Json:
    """Return what only the owner of an object changes, without what controllers write."""
    assert found is not None
    dropped = ("managedFields", "annotations", "resourceVersion")
    meta = {k: v for k, v in found["metadata"].items() if k not in dropped}
    return {k: v for k, v in found.items() if k != "status"} | {"metadata": meta}


def foreign_object(kind: str, play: Play) -> Json:
    """Return the object of somebody else. The claim has a controlling owner: without one, a job may use it."""
    found = FOREIGN[kind]
    meta = {**found["metadata"], "name": found["metadata"]["name"].replace("DEVICE", play.device)}
    if kind == "persistentvolumeclaims":
        play.kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "database"}})
        owner = play.kubectl.get("configmap", "database")
        assert owner is not None
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "database", "uid": owner["metadata"]["uid"]}
        meta["ownerReferences"] = [{**reference, "controller": True}]
    return {**found, "metadata": meta}


@pytest.mark.parametrize("kind", FOREIGN)
def test_objects_of_other_owners_are_left_alone(kind: str, play: Play) -> None:
    """Fixed bug: a job of this name replaced the object, and its deletion deleted the object."""
    foreign = foreign_object(kind, play)
    name = foreign["metadata"]["name"]
    job = re.sub("-(agent|plan|checkpoints|DEVICE)$", "", FOREIGN[kind]["metadata"]["name"])
    play.kubectl.apply(foreign)
    before = lasting(play.kubectl.get(kind, name))
    play.submit(job, **CHANGES.get(kind, {}))
    play.until_reported(job, "PodsReady", "NamesTaken", foreign["kind"], name)
    assert lasting(play.kubectl.get(kind, name)) == before
    assert not play.kubectl.list("pods", f"dljob.dev/job={job}")
    play.kubectl.delete("dljob", job, "--wait=true")
    play.run("bystander-" + kind)  # the garbage collector had time
    assert lasting(play.kubectl.get(kind, name)) == before
    play.kubectl.delete("dljob", "bystander-" + kind)


def test_job_starts_when_the_name_becomes_free(play: Play) -> None:
    play.kubectl.apply({**DENY, "metadata": {"name": "patience"}})
    play.submit("patience")
    play.until_reported("patience", "PodsReady", "NamesTaken", "NetworkPolicy", "patience")
    play.kubectl.delete("networkpolicies", "patience")
    play.until_ready("patience")
    play.kubectl.delete("dljob", "patience")


def stranger(name: str, job: str, node: str) -> Json:
    """Return a pod of somebody else with the label of a job, on a node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"dljob.dev/job": job, "dljob.dev/group": "none"}},
        "spec": {
            "nodeName": node,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "main", "image": "example.invalid/other:1"}],
        },
    }


def test_pods_of_other_owners_are_neither_counted_nor_deleted(play: Play, nodes: HollowNodes) -> None:
    """Fixed bug: the operator force-deleted such a pod when its node was lost."""
    play.run("popular", runPolicy={"nodeLostSeconds": 10})
    used = {pod["spec"]["nodeName"] for pod in play.kubectl.list("pods", "dljob.dev/job=popular")}
    free = next(name for name in nodes.names if name not in used)
    play.kubectl.apply(stranger("stranger", "popular", free))
    wait_for("the pod", lambda: play.kubectl.get("pod", "stranger"), 10)
    uid = play.kubectl.get("pod", "stranger")["metadata"]["uid"]  # type: ignore[index]
    play.patch("popular", suspend=True)
    play.kubectl.wait_phase("popular", "Suspended", 30)
    kept = play.kubectl.get("pod", "stranger")
    assert kept is not None and kept["metadata"]["uid"] == uid and "deletionTimestamp" not in kept["metadata"]
    play.kubectl.delete("pod", "stranger", "--force", "--grace-period=0")
    play.kubectl.delete("dljob", "popular")


def test_pods_of_a_foreign_set_are_neither_counted_nor_deleted(play: Play) -> None:
    """The set has the name of one of the job's, and its pods have the labels. Fixed bug: only the name counted."""
    labels = {"dljob.dev/job": "copied", "dljob.dev/group": play.device}
    foreign = FOREIGN["statefulsets"]
    container = {"name": "main", "image": "example.invalid/other:1"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"tolerations": [{"operator": "Exists"}], "containers": [container]},
    }
    spec = {**foreign["spec"], "replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    play.kubectl.apply({**foreign, "metadata": {"name": f"copied-{play.device}"}, "spec": spec})
    [pod] = wait_for("the pod", lambda: play.kubectl.list("pods", "dljob.dev/job=copied"), 20)
    play.submit("copied")
    play.until_reported("copied", "PodsReady", "NamesTaken", "StatefulSet", f"copied-{play.device}")
    play.patch("copied", suspend=True)
    play.kubectl.wait_phase("copied", "Suspended", 30)
    kept = play.kubectl.get("pod", pod["metadata"]["name"])
    assert kept is not None and kept["metadata"]["uid"] == pod["metadata"]["uid"]
    assert play.kubectl.job("copied")["status"].get("ready", "0/0").startswith("0/")
    play.kubectl.delete("statefulset", f"copied-{play.device}")
    play.kubectl.delete("dljob", "copied")


def test_plan_that_a_user_edits_is_not_used(play: Play) -> None:
    """Fixed bug: the operator stopped the pods, and started them on the nodes that the edited plan named."""
    play.run("edited")
    before, pods = play.kubectl.get("configmap", "edited-plan"), play.kubectl.list("pods", "dljob.dev/job=edited")
    assert before is not None
    own = json.loads(before["data"][OPERATOR_KEY])
    own |= {"domain": [[{"key": "team", "operator": "In", "values": ["b"]}]], "replans": 1}
    play.kubectl.patch("configmap", "edited-plan", {"data": {OPERATOR_KEY: json.dumps(own)}})
    play.kubectl.wait_events("edited", "SignatureWrong", "PlanRestored")

    def restored() -> bool:
        found = play.kubectl.get("configmap", "edited-plan")
        return found is not None and found["data"] == before["data"]

    wait_for("the operator's plan", restored, 30)
    after = play.kubectl.list("pods", "dljob.dev/job=edited")
    assert [pod["metadata"]["uid"] for pod in after] == [pod["metadata"]["uid"] for pod in pods]
    play.kubectl.delete("dljob", "edited")


def nested(depth: int) -> Json:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return {"manager": "me", "spec": {"hostAliases": [value]}}


def submit_raw(play: Play, name: str, override: Json) -> None:
    """Create a suspended job by a raw POST, because kubectl's YAML parser limits the depth too."""
    spec = {
        "model": {"name": "digits-cnn"}, "dataset": {"name": "digits"}, "globalBatchSize": 60, "epochs": 1,
        "suspend": True,
    }  # fmt: skip
    job = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": {"name": name}, "spec": spec}
    text = json.dumps({**job, "spec": {**spec, "podTemplateOverrides": ["OVERRIDE"]}})
    path = f"/apis/dljob.dev/v1alpha1/namespaces/{play.kubectl.namespace}/dljobs"
    play.kubectl.run("create", "--raw", path, "-f", "-", stdin=text.replace('"OVERRIDE"', deep_text(override)))


def accepted(play: Play, name: str) -> str:
    """Return the message of the condition Accepted if it is False, without decoding the spec."""
    path = '{.status.conditions[?(@.reason=="InvalidSpec")].message}'
    return play.kubectl.run("get", "dljob", name, "-o", f"jsonpath={path}")


def deep_text(value: Any) -> str:
    """Return JSON of a value that is nested too deeply for ``json.dumps``."""
    parts: list[str] = []
    closing: list[str] = []
    while isinstance(value, dict) and len(value) == 1:
        key, value = next(iter(value.items()))
        parts.append(f'{{"{key}":')
        closing.append("}")
    if isinstance(value, dict):
        inner = ",".join(f"{json.dumps(key)}:{deep_text(item)}" for key, item in value.items())
        return "".join(parts) + "{" + inner + "}" + "".join(closing)
    if isinstance(value, list):
        return "".join(parts) + "[" + ",".join(map(deep_text, value)) + "]" + "".join(closing)
    return "".join(parts) + json.dumps(value) + "".join(closing)


EVIL: dict[str, Json] = {
    "deep": nested(1500),
    "long": {"manager": "me", "spec": {"hostAliases": [{"ip": "x" * 200_000}]}},
    "wide": {"manager": "me", "spec": {"hostAliases": [{"ip": "1.2.3.4"}] * 40_000}},
}


@pytest.mark.parametrize("case", ["deep", *(pytest.param(each, marks=pytest.mark.long) for each in ("long", "wide"))])
def test_object_that_cannot_be_decoded_concerns_itself_alone(case: str, play: Play, operator: OperatorProcess) -> None:
    """Fixed bug: a deeply nested job stopped the operator for every namespace, even after a restart."""
    submit_raw(play, f"evil-{case}", EVIL[case])
    wait_for("the condition", lambda: "65536" in accepted(play, f"evil-{case}"), 30)
    play.run(f"good-{case}")
    assert operator.stop() == 0, operator.log
    operator.start()
    play.finish(f"good-{case}")
    play.run(f"after-{case}")
    play.finish(f"after-{case}")
    assert "65536" in accepted(play, f"evil-{case}")
    for name in (f"evil-{case}", f"good-{case}", f"after-{case}"):
        play.kubectl.delete("dljob", name)


SECRETS: dict[str, tuple[Json, str]] = {
    # the job, and the start of its Secret's name: (fields of the spec, field that the message names)
    "data": (
        {"dataset": {"uri": "https://example.invalid/a.npz", "samples": 100, "secretName": "data-keys"}},
        "spec.dataset.secretName",
    ),
    "variable": (
        {"trainer": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "variable-keys", "key": "a"}}}]}},
        "spec.trainer.env[0].valueFrom.secretKeyRef.name",
    ),
    "environment": (
        {"trainer": {"envFrom": [{"secretRef": {"name": "environment-keys"}}]}},
        "spec.trainer.envFrom[0].secretRef.name",
    ),
}


def test_overrides_and_secrets_need_permission(play: Play) -> None:
    """Fixed bug: a DLJob rendered pods with hostPID and any Secret of the namespace.

    The jobs wait together, because the operator reads a Secret again only after half a minute.
    """
    play.submit("sneaky", podTemplateOverrides=[{"manager": "me", "spec": {"hostPID": True}}])
    for case, (spec, _) in SECRETS.items():
        play.kubectl.run("create", "secret", "generic", f"{case}-keys", "--from-literal=a=b")
        play.submit(case, **spec)
    play.until_reported("sneaky", "Accepted", "OverridesNotAllowed", "spec.podTemplateOverrides[0].spec.hostPID")
    for case, (_, field) in SECRETS.items():
        play.until_reported(case, "Accepted", "SecretNotUsable", field, f"{case}-keys", "without this label")
    assert not play.kubectl.list("statefulsets", f"dljob.dev/job in (sneaky, {', '.join(SECRETS)})")
    play.kubectl.run("label", "secret", *(f"{case}-keys" for case in SECRETS), "dljob.dev/usable=true")

    def pods(case: str) -> list[Json]:
        return play.kubectl.list("pods", f"dljob.dev/job={case}")

    for case in SECRETS:
        found = wait_for(f"the pods of {case}", lambda case=case: pods(case), 60)
        assert f"{case}-keys" in json.dumps(found[0]["spec"])
    for name in ("sneaky", *SECRETS):
        play.kubectl.delete("dljob", name)


def test_oversized_report_is_ignored(play: Play, operator: OperatorProcess) -> None:
    play.run("verbose")
    play.write_report("verbose", json.dumps({"schema": 1, "uid": "x", "padding": "x" * 900_000}))
    play.until_reported("verbose", "ReportValid", "InvalidReport", "verbose-report", "bytes")
    play.report("verbose", RunPhase.RUNNING, step=50)
    play.finish("verbose")


def profiles(kubectl: Kubectl) -> set[str]:
    return {item["metadata"]["name"] for item in kubectl.list("dlprofiles")}


def test_report_creates_profiles_of_planned_devices_only(play: Play) -> None:
    """Fixed bug: one report created 5,120 cluster-scoped profiles."""
    play.run("flood")
    before = profiles(play.kubectl)
    ranks = tuple(RankMeasure(rank=i, device=f"invented-{i}", share=30, compute_s=0.1) for i in range(2))
    play.report("flood", RunPhase.SUCCEEDED, step=100, step_s=0.01, ranks=ranks)
    play.kubectl.wait_phase("flood", "Complete", 30)
    assert not [name for name in profiles(play.kubectl) - before if "invented" in name]
