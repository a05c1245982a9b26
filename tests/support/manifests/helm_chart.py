"""Rendering of the chart with Helm's engine, without a cluster."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import helm_engine

Json = dict[str, Any]
CHART = Path(__file__).resolve().parents[3] / "charts" / "dljob"

MONITORED: Json = {
    "metrics": {
        name: {"enabled": True, "labels": {"release": "prometheus"}}
        for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
    }
}
JOB_DEFAULTS: Json = {
    "trainer": {"imagePullSecrets": ["registry"]},
    "scheduling": {
        "nodeSelector": {"pool": "training", "example.com/zone": "a"},
        "tolerations": [
            {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"},
            {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30},
        ],
        "disruption": "Avoid",
        "priorityClassName": "batch",
        "runtimeClassName": "gvisor",
        "schedulerName": "gang",
        "podGroupLabel": "example.com/group",
    },
    "runPolicy": {"activeDeadlineSeconds": 86400, "ttlSecondsAfterFinished": 1000000},
    "checkpoint": {"volume": {"storageClassName": "shared"}},
    "prices": {"usdPerDeviceHour": {"NVIDIA-A100-SXM4-40GB": 1.8, "cpu": 0.02}, "usdPerKwh": 0.25},
}
"""Every field of jobDefaults."""
# Values of several installations, each of which is validated for every Kubernetes version.
WAYS: dict[str, Json] = {
    "defaults": {},
    "monitored": MONITORED,
    "highly available": {
        "replicas": 2,
        "podDisruptionBudget": {"enabled": True},
        "priorityClassName": "system-cluster-critical",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "affinity": {"nodeAffinity": {}},
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
    },
    "with defaults of jobs": {"jobDefaults": JOB_DEFAULTS},
    "with Kueue": {"kueue": {"enabled": True}},
    "one namespace": {"singleNamespaceInstall": True},
    "two namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "by digest": {"image": {"repository": "registry.example:5000/dljob-operator", "digest": f"sha256:{'a' * 64}"}},
    "brought along": {
        "crds": {"enabled": False},
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "metrics": {"service": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "leaderElection": {"enabled": False},
        "imagePullSecrets": ["registry"],
        "podSecurityContext": {"runAsUser": 54321},
        "operator": {"extraEnv": [{"name": "TZ", "value": "UTC"}]},
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "fullnameOverride": "trainer",
    },
}


def render(values: Json | None = None, release: str = "dljob", namespace: str = "dljob-system") -> list[Json]:
    """Return every object of a release. The caller may change them."""
    return copy.deepcopy(_rendered(json.dumps(values or {}), release, namespace))


@cache
def _rendered(values: str, release: str, namespace: str) -> list[Json]:
    texts = helm_engine.render(CHART, release, namespace, json.loads(values))
    manifests = [text for path, text in sorted(texts.items()) if not path.endswith("NOTES.txt")]
    return [document for text in manifests for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def of_kind(objects: list[Json], kind: str) -> list[Json]:
    return [o for o in objects if o["kind"] == kind]


def one(objects: list[Json], kind: str) -> Json:
    [found] = of_kind(objects, kind)
    return found
