"""Tests of the manifests of several jobs against readable golden files and every Kubernetes version.

The test writes the files in this folder. After a change of the rendered objects, run

    hack/update-golden

and review the difference. The real planner plans each job on a fixed cluster. Two things differ from the applied
objects, so that files are readable and do not change with the performance model: the JSON in the plan's ConfigMap is
shown as YAML, and predictions as ``(predicted)``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlcontract import PLAN_KEY
from dljob.calibrate import Learned, NoiseOf
from dljob.cluster import ClusterView
from dljob.job.defaults import parse_defaults
from dljob.job.plan.stored import OPERATOR_KEY, StoredPlan
from dljob.render import RenderConfig
from dljob.render.gang import KUBERNETES_ALPHA
from support.builders import A100, CONFIG, CPUS, DIGITS, MIXED, T4, Json, nodes, rendered, seen
from support.manifests.golden import assert_golden
from support.manifests.schema_validation import ALL, assert_valid

HERE = Path(__file__).resolve().parent
DEFAULTS = parse_defaults({
    "trainer": {"imagePullSecrets": ["registry"]},
    "scheduling": {
        "nodeSelector": {"pool": "training", "zone": "a"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"}],
        "disruption": "Avoid",
        "priorityClassName": "batch",
        "runtimeClassName": "gvisor",
    },
    "runPolicy": {"ttlSecondsAfterFinished": 604800},
    "checkpoint": {"volume": {"storageClassName": "shared"}},
    "prices": {"usdPerDeviceHour": {"cpu": 0.02, "Tesla-T4": 0.3}, "usdPerKwh": 0.25},
})  # fmt: skip
TRAINING_POOL = nodes({
    "name": "n", "count": 3, "cpu": 2, "memory": "4Gi", "labels": {"pool": "training", "zone": "b"},
    "taints": [{"key": "dedicated", "value": "training", "effect": "NoSchedule"}],
})  # fmt: skip
SPOT_LABEL = {"cloud.google.com/gke-spot": "true"}
ZONES = nodes(
    {"name": "a", "count": 3, "cpu": 2, "memory": "4Gi", "zone": "a", "labels": SPOT_LABEL},
    {"name": "b", "count": 3, "cpu": 2, "memory": "4Gi", "zone": "b"},
    {"name": "c", "count": 2, "cpu": 2, "memory": "4Gi", "zone": "c"},
)
SPOT_AND_ZONES = parse_defaults(
    {
        "spot": {"priceFactor": 0.3, "interruptionsPerHour": 0.05},
        "topology": {"betweenZones": {"bandwidth": "1M", "latencySeconds": 0.05}},
    }
)
HINTS = {"parameters": 1_000_000, "flopsPerSample": 3e6}


@dataclass(frozen=True)
class Case:
    spec: Json
    view: ClusterView = CPUS
    learned: Mapping[tuple[str, str], Learned] = field(default_factory=dict)
    config: RenderConfig = CONFIG
    versions: tuple[str, ...] = ALL
    """Versions of Kubernetes that have all kinds of the objects."""


def on_nodes(count: int, **more: Any) -> Json:
    """Set the memory, so that only ``digits`` shows the predicted memory."""
    return {**DIGITS, "nodes": {"min": count, "max": count}, "resources": {"memory": "1Gi"}, **more}


CASES = {
    "digits": Case({
        **DIGITS,
        "globalBatchSize": 120,
        "checkpoint": {"interval": "5s", "volume": {"size": "256Mi", "reclaimPolicy": "Delete"}},
    }),
    "checkpoints-in-s3": Case(
        on_nodes(3, checkpoint={"uri": "s3://models/team-a", "secretName": "s3", "keep": 2})
    ),
    "staged-script": Case({
        "nodes": {"min": 2, "max": 2},
        "trainer": {
            "image": "registry.example/ours:7", "framework": "Torchrun", "command": ["python", "train.py"],
            "scratch": {"size": "4Gi"},
        },
        "checkpoint": {"uri": "s3://models", "stagingSize": "50Gi"},
        "resources": {"memory": "1Gi"},
    }),
    "mixed": Case(
        {
            "model": {"name": "resnet50"},
            "dataset": {"name": "synthetic-images"},
            "globalBatchSize": 512,
            "steps": 1000,
            "collective": "MPI",
            "planning": {
                "mode": "Fixed",
                "groups": [
                    {"device": A100, "nodes": 1, "ranksPerNode": 2, "batchPerRank": 208},
                    {"device": T4, "nodes": 2, "batchPerRank": 48},
                ],
            },
            "checkpoint": {"volume": {"storageClassName": "fast-shared", "size": "20Gi"}},
            "resources": {"memory": "16Gi"},
            "scheduling": {
                "priorityClassName": "research",
                "schedulerName": "gang",
                "podGroupLabel": "scheduling.example/pod-group",
                "disruption": "Avoid",
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            },
        },
        MIXED,
    ),
    "own-image": Case(
        on_nodes(
            2,
            model={"hints": HINTS},
            dataset={"uri": "pvc://corpus/train.npz", "samples": 5000},
            trainer={
                "image": "registry.example/ours:7",
                "imagePullPolicy": "Always",
                "imagePullSecrets": ["regcred"],
                "command": ["python", "train.py"],
                "args": ["--depth", "4"],
                "env": [{"name": "LEVEL", "value": "debug"}, {"name": "DLJOB_NAME", "value": "cannot be changed"}],
            },
            resources={"cpu": "1500m", "cpuLimit": "2", "memory": "2Gi"},
            podTemplateOverrides=[
                {
                    "manager": "queue.example",
                    "metadata": {
                        "labels": {"queue.example/name": "night", "dljob.dev/job": "cannot be changed"},
                        "annotations": {"queue.example/admitted": "true"},
                    },
                    "spec": {
                        "nodeSelector": {"zone": "b"},
                        "containers": [
                            {"name": "trainer", "env": [{"name": "LEVEL", "value": "trace"}]},
                            {"name": "sidecar", "image": "registry.example/sidecar:1"},
                        ],
                    },
                },
                {"manager": "people", "spec": {"terminationGracePeriodSeconds": 300}},
            ],
        )
    ),
    "existing-claim": Case(on_nodes(2, checkpoint={"volume": {"claimName": "team-scratch"}})),
    "dataset-fetched": Case(
        on_nodes(
            2,
            dataset={
                "uri": "s3://corpus/sets/train.npz",
                "samples": 1437,
                "sha256": "0123456789abcdef" * 4,
                "size": "20Gi",
                "secretName": "corpus-reader",
            },
            trainer={"env": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}]},
        )
    ),
    "dataset-sharded": Case(
        on_nodes(
            2,
            dataset={
                "uri": "s3://corpus/sets/train.npz",
                "samples": 1437,
                "sampleBytes": 64,
                "distribution": "Sharded",
                "sha256": "0123456789abcdef" * 4,
                "size": "20Gi",
                "secretName": "corpus-reader",
            },
        )
    ),
    "script-from-git": Case(
        {
            "trainer": {
                "framework": "Torchrun",
                "image": "registry.example/pytorch:2",
                "command": ["torchrun", "train.py"],
                "source": {
                    "git": {
                        "url": "https://git.example/team/training.git",
                        "revision": "0123456789" * 4,
                        "path": "examples/digits",
                        "secretName": "git-reader",
                    }
                },
                "env": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
                "scratch": {"size": "5Gi"},
            },
            "nodes": {"min": 2},
            "resources": {"memory": "1Gi"},
        }
    ),
    "script-from-archive": Case(
        on_nodes(
            1,
            model={"hints": HINTS},
            dataset={"uri": "https://data.example/train.npz", "samples": 1437},
            trainer={
                "command": ["python", "train.py"],
                "source": {"archive": {"uri": "pvc://scripts/team/v1.zip", "sha256": "0123456789abcdef" * 4}},
            },
        )
    ),
    "scratch-space": Case(
        on_nodes(
            1,
            model={"hints": HINTS},
            dataset={"uri": "https://data.example/train.npz", "samples": 10000, "sampleBytes": 300000, "size": "5Gi"},
            trainer={
                "image": "registry.example/tuning:1",
                "command": ["python", "tune.py"],
                "scratch": {"size": "Auto"},
                "env": [{"name": "HF_HOME", "value": "/cache/shared"}],
            },
        )
    ),
    "chosen-batch": Case(
        on_nodes(3, globalBatchSize=24, batchSizeRange={"max": 96}),
        learned={("digits-cnn", "cpu"): Learned(noise=NoiseOf("digits", samples=2000.0, steps=500))},
    ),
    "auto-pipeline": Case({
        "model": {"name": "resnet18"},
        "dataset": {"name": "synthetic-images"},
        "globalBatchSize": 256,
        "steps": 30,
        "nodes": {"max": 3},
        "parallelism": {"strategy": "Auto", "gradientAccumulation": "Never"},
        "resources": {"memory": "1Gi"},
    }),
    "gradient-accumulation": Case({
        "model": {"name": "gpt-mini"},
        "dataset": {"name": "synthetic-tokens"},
        "globalBatchSize": 256,
        "steps": 10,
        "nodes": {"max": 2},
        "resources": {"memory": "1Gi"},
    }),
    "administrators-defaults": Case(
        on_nodes(2, scheduling={"nodeSelector": {"zone": "b"}, "priorityClassName": "own"}),
        TRAINING_POOL,
        config=replace(CONFIG, job_defaults=DEFAULTS),
    ),
    "spot-nodes": Case(
        on_nodes(2, objective={"minimize": "Cost"}),
        ZONES,
        config=replace(CONFIG, job_defaults=SPOT_AND_ZONES),
    ),
    "one-zone": Case(
        on_nodes(2, scheduling={"spot": "Avoid"}),
        ZONES,
        config=replace(CONFIG, job_defaults=SPOT_AND_ZONES),
    ),
    "gang-scheduled": Case(
        on_nodes(2, scheduling={"priorityClassName": "batch"}),
        config=replace(CONFIG, pod_group_api=KUBERNETES_ALPHA),
        versions=("1.36.0",),
    ),
    "no-checkpoints": Case(on_nodes(1, checkpoint={"enabled": False})),
    "torchrun-only": Case({
        "trainer": {
            "image": "registry.example/ours:7",
            "command": ["torchrun", "train.py"],
            "framework": "Torchrun",
            "env": [
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tracking", "key": "token"}}},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ],
            "envFrom": [{"configMapRef": {"name": "settings", "optional": True}}],
        },
        "nodes": {"min": 2},
        "resources": {"memory": "2Gi"},
    }),
    "mpi": Case({
        "trainer": {
            "image": "registry.example/ours:7",
            "command": ["mpirun", "-np", "2", "python", "train.py"],
            "framework": "MPI",
        },
        "nodes": {"min": 2},
        "resources": {"memory": "2Gi"},
    }),
    "torchrun": Case(
        on_nodes(
            2,
            model={"hints": HINTS},
            collective="Auto",
            dataset={"uri": "file:///data", "samples": 5000},
            trainer={"command": ["python", "ddp.py"], "framework": "Torchrun"},
        )
    ),
}  # fmt: skip


class Readable(yaml.SafeDumper):
    """A dumper without anchors and with indented lists."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def shown(manifest: Json) -> Json:
    """Return a manifest as shown in its file."""
    if PLAN_KEY not in manifest.get("data", {}):
        return manifest
    plan, mine = (json.loads(manifest["data"][key]) for key in (PLAN_KEY, OPERATOR_KEY))
    mine["memory_nbytes"] = "(predicted)"
    if "memory_by_group" in mine:
        mine["memory_by_group"] = dict.fromkeys(mine["memory_by_group"], "(predicted)")
    if "expected" in plan:  # Without a prediction, all values have their defaults.
        plan["expected"] = dict.fromkeys(plan["expected"], "(predicted)")
    for key in ("predicted", "candidates", "rejected"):
        mine["status"][key] = "(predicted)"
    if choice := mine["status"].get("batchChoice"):
        choice["candidates"] = "(predicted)"
    return {**manifest, "data": {PLAN_KEY: plan, OPERATOR_KEY: mine}}


def text_of(name: str) -> str:
    manifests = [shown(manifest) for manifest in manifests_of(name)]
    head = f"# Applied for the job {name!r} of test_golden.py, which makes this file.\n"
    return head + yaml.dump_all(manifests, Dumper=Readable, sort_keys=False, width=120, explicit_start=True)


def manifests_of(name: str) -> tuple[Json, ...]:
    """Return the manifests in the order in which they are applied."""
    case = CASES[name]
    return rendered(seen(case.spec, case.view, name, learned=case.learned), case.config)


@pytest.mark.parametrize("name", CASES)
def test_manifests_match_the_golden_file(name: str) -> None:
    assert_golden(HERE / f"{name}.yaml", text_of(name))


@pytest.mark.parametrize("name", CASES)
def test_every_object_is_valid_for_every_kubernetes_version(name: str) -> None:
    for manifest in manifests_of(name):
        assert_valid(manifest, CASES[name].versions)


@pytest.mark.parametrize("name", CASES)
def test_plan_round_trips_through_its_manifest(name: str) -> None:
    data = next(m["data"] for m in manifests_of(name) if m["kind"] == "ConfigMap" and "data" in m)
    assert StoredPlan.parse(data).data() == data


def test_every_golden_file_has_a_job() -> None:
    assert {path.stem for path in HERE.glob("*.yaml")} == set(CASES)
