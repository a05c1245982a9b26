"""``dljob plan`` with absurd or contradictory specs: one message names the field, what was found, and a remedy."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from dljob.cli import main

CPUS = {"nodes": [{"name": "n", "count": 4, "cpu": 4, "memory": "16Gi"}]}
ONES = {"nodes": [{"name": "n", "count": 4, "cpu": 1, "memory": "16Gi"}]}
GPUS = {
    "nodes": [
        {"name": "a", "count": 2, "device": "NVIDIA-A100-SXM4-40GB", "devices": 4, "cpu": 32, "memory": "128Gi"},
        {"name": "t", "count": 2, "device": "Tesla-T4", "cpu": 8, "memory": "32Gi"},
    ]
}
DIGITS = {"model": {"name": "digits-cnn"}, "dataset": {"name": "digits"}, "globalBatchSize": 96, "epochs": 5}
RESNET = {"model": {"name": "resnet50"}, "dataset": {"name": "synthetic-images"}, "globalBatchSize": 96, "steps": 50}
OWN = {
    "model": {"hints": {"parameters": 10**7, "flopsPerSample": 1e9}},
    "dataset": {"uri": "https://example.com/x.npz", "samples": 10_000, "sampleBytes": 1000},
    "globalBatchSize": 64,
    "steps": 100,
    "trainer": {"image": "example.com/x:1", "command": ["python", "train.py"]},
}
MOST = 2**31 - 1
FLOPS, PARAMETERS = "model.hints.flopsPerSample", "model.hints.parameters"
STAGES = {"parallelism": {"strategy": "Pipeline", "stages": 64}}
ASYNCHRONOUS = {"synchronization": "Asynchronous"}


def fixed(nodes: int, **more: Any) -> dict[str, Any]:
    return {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": nodes, **more}]}


CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str, str, str]] = [
    # name, spec, its changes by path, cluster, field, found, a word of the remedy
    ("batch", DIGITS, {"globalBatchSize": MOST}, CPUS, "spec.globalBatchSize", str(MOST), "lower globalBatchSize"),
    ("batch of steps", RESNET, {"globalBatchSize": MOST}, GPUS, "spec.globalBatchSize", str(MOST), "lower"),
    ("batch of a script", OWN, {"globalBatchSize": MOST}, GPUS, "spec.globalBatchSize", str(MOST), "lower"),
    ("infinite cost", OWN, {FLOPS: 1e308}, GPUS, f"spec.{FLOPS}", "1e+308", "1000"),
    ("cost", OWN, {FLOPS: 1e18}, GPUS, f"spec.{FLOPS}", "1e+18", "unit"),
    ("parameters", OWN, {PARAMETERS: 10**15}, GPUS, f"spec.{PARAMETERS}", "GiB", "smaller model"),
    (
        "activations", OWN, {"model.hints.activationBytesPerSample": 10**18}, GPUS,
        "spec.model.hints.activationBytesPerSample", "GiB", "correct the figure",
    ),
    ("large sample", OWN, {"dataset.sampleBytes": 10**18}, GPUS, "spec.dataset.sampleBytes", "GiB", "correct"),
    ("space", OWN, {"dataset.size": "1"}, GPUS, "spec.dataset.size", "0 MiB", "Raise dataset.size"),
    ("epochs", DIGITS, {"epochs": MOST}, CPUS, "spec.epochs", str(MOST), "1000000"),
    ("few samples", DIGITS, {"globalBatchSize": 2, "nodes": {"min": 4}}, CPUS, "spec.globalBatchSize", "2", "raise"),
    ("more nodes than exist", DIGITS, {"nodes": {"min": 9}}, CPUS, "spec.nodes.min", "4", "lower nodes.min"),
    ("nodes", DIGITS, {"nodes": {"min": 4, "max": 2}}, CPUS, "spec.nodes.min", "4", "raise max"),
    ("range", DIGITS, {"batchSizeRange": {"min": 200, "max": 300}}, CPUS, "spec.batchSizeRange", "200", "widen"),
    ("deadline", RESNET, {"objective.deadline": "1ms"}, CPUS, "spec.objective.deadline", "1ms", "Raise the deadline"),
    ("fixed batches", DIGITS, {"planning": fixed(2, batchPerRank=100)}, CPUS, "spec.planning.groups", "200", "change"),
    ("fixed ranks", DIGITS, {"globalBatchSize": 2, "planning": fixed(4)}, CPUS, "spec.globalBatchSize", "2", "raise"),
    ("fixed nodes", DIGITS, {"nodes": {"max": 1}, "planning": fixed(4)}, CPUS, "spec.nodes.max", "1", "Remove"),
    ("CPUs", DIGITS, {"resources": {"cpu": "1000"}}, CPUS, "spec.resources.cpu", "1000", "lower resources.cpu"),
    ("no CPUs", DIGITS, {"resources": {"cpu": "0"}}, CPUS, "spec.resources.cpu", "0;", "remove resources.cpu,"),
    ("no CPUs with a unit", DIGITS, {"resources": {"cpu": "0.0m"}}, CPUS, "spec.resources.cpu", "0;", "remove"),
    ("no CPUs for a GPU", RESNET, {"resources": {"cpu": "0"}}, GPUS, "spec.resources.cpu", "0;", "remove"),
    ("CPU limit", DIGITS, {"resources": {"cpuLimit": "0"}}, CPUS, "spec.resources.cpuLimit", "0;", "no limit"),
    ("no memory", DIGITS, {"resources": {"memory": "0"}}, CPUS, "spec.resources.memory", "0;", "remove"),
    ("memory", DIGITS, {"resources": {"memory": "1"}}, CPUS, "spec.resources.memory", "0 MiB", "raise"),
    ("server", DIGITS, {"nodes": {"max": 1}, "parallelism": ASYNCHRONOUS}, ONES, "spec.nodes.max", "1", "raise"),
    ("stages", DIGITS, STAGES, CPUS, "spec.parallelism.stages", "64", "fewer"),
    ("parts", DIGITS, {"parallelism.microBatches": 10**5}, CPUS, "spec.parallelism.microBatches", "100000", "4096"),
    ("device", DIGITS, {"devices": ["h100"]}, CPUS, "spec.devices", "h100", "correct the name"),
    ("interval", DIGITS, {"checkpoint": {"interval": "0s"}}, CPUS, "spec.checkpoint.interval", "0s", "set a time"),
]  # fmt: skip


def changed(spec: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = deepcopy(spec)
    for path, value in changes.items():
        at, (*parents, last) = found, path.split(".")
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return found


@pytest.mark.parametrize(
    ("spec", "changes", "cluster", "field", "found", "remedy"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_one_message_names_the_field_that_is_the_cause(
    spec: dict[str, Any],
    changes: dict[str, Any],
    cluster: dict[str, Any],
    field: str,
    found: str,
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job: dict[str, Any] = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": {"name": "x"}}
    job["spec"] = changed(spec, changes)
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (tmp_path / "cluster.yaml").write_text(json.dumps(cluster))
    code = main(["plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml"), "--json"])
    printed = capsys.readouterr()
    if code == 2:
        message = printed.err
    else:
        told = json.loads(printed.out)
        wrong = told["infeasible"]
        message = f"{wrong['field']}: {wrong['message']}" if code else told["warning"]
    assert field in message
    after = message.partition(field)[2]
    assert found in after and remedy in after
    assert code == 2 or after.count("found") <= 2, "one message for one mistake"
