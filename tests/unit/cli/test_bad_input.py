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
    (
        "low CPU limit", DIGITS, {"resources": {"cpu": "2", "cpuLimit": "1500m"}}, CPUS,
        "spec.resources.cpuLimit", "1.5", "raise",
    ),
    ("no memory", DIGITS, {"resources": {"memory": "0"}}, CPUS, "spec.resources.memory", "0;", "remove"),
    ("memory", DIGITS, {"resources": {"memory": "1"}}, CPUS, "spec.resources.memory", "found 1 byte ", "raise"),
    ("server", DIGITS, {"nodes": {"max": 1}, "parallelism": ASYNCHRONOUS}, ONES, "spec.nodes.max", "1", "raise"),
    ("stages", DIGITS, STAGES, CPUS, "spec.parallelism.stages", "64", "fewer"),
    ("parts", DIGITS, {"parallelism.microBatches": 10**5}, CPUS, "spec.parallelism.microBatches", "100000", "4096"),
    ("device", DIGITS, {"devices": ["h100"]}, CPUS, "spec.devices", "h100", "correct the name"),
    ("CPUs without quotes", DIGITS, {"resources": {"cpu": 0.5}}, CPUS, "spec.resources.cpu", "0.5", 'quotes: "0.5"'),
    ("command", OWN, {"trainer.command": "python a.py"}, GPUS, "spec.trainer.command", "python", "[python, a.py]"),
    ("one device", DIGITS, {"devices": "cpu"}, CPUS, "spec.devices", "cpu", "[cpu]"),
    ("variables", DIGITS, {"trainer.env": {"A": "b"}}, CPUS, "spec.trainer.env", "A", "[{name: A, value: b}]"),
    ("model", DIGITS, {"model": "mlp"}, CPUS, "spec.model", "mlp", "{name: mlp}"),
    ("data set", DIGITS, {"dataset": "digits"}, CPUS, "spec.dataset", "digits", "{name: digits}"),
    ("planning", DIGITS, {"planning": "Fixed"}, CPUS, "spec.planning", "Fixed", "{mode: Fixed}"),
    ("number of nodes", DIGITS, {"nodes": 3}, CPUS, "spec.nodes", "3", "{min: 3, max: 3}"),
    ("text for a number", DIGITS, {"epochs": "5"}, CPUS, "spec.epochs", "5", "a number without quotes"),
    ("true for a number", DIGITS, {"globalBatchSize": True}, CPUS, "spec.globalBatchSize", "True", "integer"),
    ("local data", OWN, {"dataset.uri": "/data/x.npz"}, GPUS, "spec.dataset.uri", "/data", "s3://BUCKET/KEY"),
    ("checksum", OWN, {"dataset.sha256": "abc"}, GPUS, "spec.dataset.sha256", "abc", "64 hexadecimal digits"),
    (
        "time that has passed", DIGITS, {"scheduling": {"finishBy": "2020-01-31T00:00:00Z"}}, CPUS,
        "spec.scheduling.finishBy", "2020-01-31", "Correct it",
    ),
    ("samples", DIGITS, {"dataset.samples": 5}, CPUS, "spec.dataset.samples", "5; expected 1437", "Remove"),
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


JOB = json.dumps({"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": {"name": "x"}, "spec": DIGITS})


@pytest.mark.parametrize(
    ("job", "cluster", "message"),
    [
        (JOB.replace('"epochs"', '"epochs": 7, "epochs"').encode(), CPUS, "found the key 'epochs' twice"),
        (JOB.replace("DLJob", "DLjob").encode(), CPUS, "found no DLJob among its documents, but the kind DLjob"),
        (JOB.encode("utf-16"), CPUS, "found the byte 0xff at position 0; expected text in UTF-8"),
        (f"{JOB}\n---\n{JOB}".encode(), CPUS, "metadata.name: found two DLJobs named x; expected different names"),
        (JOB.encode(), {"nodes": 3}, "cluster: nodes: found 3; expected a list of nodes, such as [{count: 3, cpu: 2"),
        (JOB.encode(), {"pods": []}, "cluster: found pods; expected a mapping with the single key nodes"),
        (JOB.encode(), {"nodes": [{"cpu": 2, "devices": 4}]}, "nodes[0].devices: found 4 without a device"),
    ],
    ids=["key", "kind", "encoding", "name", "nodes", "cluster", "device"],
)
def test_files_that_are_no_job_or_no_cluster(
    job: bytes, cluster: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_bytes(job)
    (tmp_path / "cluster.yaml").write_text(json.dumps(cluster))
    assert main(["plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory", 4, "found 4, which is 4 bytes; expected at least 1Mi: bytes with a unit, such as 4Gi. Add"),
        ("memory", "512m", "found '512m', which is 0.512 bytes; expected at least 1Mi"),
        ("memory", "4GB", "found '4GB'; expected bytes with a unit, such as 4Gi. Correct it"),
        ("memory", -1, "found -1; expected bytes with a unit"),
        ("storage", 100, "found 100, which is 100 bytes; expected at least 1Mi"),
        ("bandwidth", "10Gbit", "found '10Gbit'; expected bytes per second, such as 1.25G for a network of 10 Gbit/s"),
        ("bandwidth", 10, "found 10, which is 10 bytes/s; expected at least 1k"),
        ("bandwidth", "0", "found '0'; expected bytes per second"),
        ("cpu", "-1", "found '-1'; expected a quantity above 0, such as 2 or 500m"),
        ("machineCpu", -4, "found -4; expected a quantity above 0"),
        ("devices", 0, "found 0; expected 1 to 64. For a node without GPUs, remove device and devices"),
        ("devices", -1, "found -1; expected a whole number from 1 to 64"),
        ("free", -1, "found -1; expected a whole number from 0 to 1"),
        ("count", 0, "found 0; expected a whole number from 1 to 100000"),
    ],
)
def test_quantities_of_nodes(
    field: str, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "cluster.yaml").write_text(json.dumps({"nodes": [{"device": "Tesla-T4", "cpu": 4, field: value}]}))
    assert main(["plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]) == 2
    assert f"cluster: nodes[0].{field}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metadata", "field", "found", "remedy"),
    [
        ({"name": "X_y"}, "metadata.name", "'X_y'", "choose a name"),
        ({"name": "x" * 41}, "metadata.name", repr("x" * 41), "at most 40 characters"),
        (
            {"name": None, "generateName": "x-"},
            "metadata.name",
            "generateName 'x-' without a name",
            "Add metadata.name",
        ),
        ({"namespace": "A_b"}, "metadata.namespace", "'A_b'", "Correct it"),
        ({"namespace": 5}, "metadata.namespace", "5", "Correct it"),
        ({"labels": ["a"]}, "metadata.labels", "['a']", "Write it as {team: vision}"),
        ({"labels": {"a": 1}}, "metadata.labels.a", "1", 'quotes: "1"'),
        ({"labels": {"a": True}}, "metadata.labels.a", "true", 'quotes: "true"'),
        ({"labels": {"a": "two words"}}, "metadata.labels.a", "'two words'", "use an annotation"),
        ({"labels": {"a": "x" * 64}}, "metadata.labels.a", repr("x" * 64), "at most 63"),
        ({"labels": {"a b": "c"}}, "metadata.labels", "the key 'a b'", "Correct it"),
        ({"annotations": {"a/b/c": "d"}}, "metadata.annotations", "the key 'a/b/c'", "Correct it"),
        ({"annotations": {"a": 1.5}}, "metadata.annotations.a", "1.5", "quotes"),
        ({"annotations": {"a": {"b": "c"}}}, "metadata.annotations.a", '{"b": "c"}', "Write one text"),
    ],
)
def test_metadata_that_the_api_server_would_refuse(
    metadata: dict[str, Any], field: str, found: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = json.loads(JOB)
    job["metadata"] |= metadata
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (tmp_path / "cluster.yaml").write_text(json.dumps(CPUS))
    assert main(["plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]) == 2
    message = capsys.readouterr().err
    assert f" {field}: found {found}" in message and remedy in message


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "0.001", ".001"])
def test_numbers_are_read_as_kubectl_reads_them(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JOB.replace('"epochs": 5', f'"epochs": 5e0, "optimizer": {{"learningRate": {number}}}')
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "cluster.yaml").write_text(json.dumps(CPUS))
    assert main(["plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] is not None


@pytest.mark.parametrize("option", ["--cluster", "--profiles", "--defaults"])
def test_empty_path_is_no_path(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fixed bug: with an unset variable in a script, ``dljob plan`` asked the cluster of the kubeconfig."""
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "cluster.yaml").write_text(json.dumps(CPUS))
    others = [] if option == "--cluster" else ["--cluster", str(tmp_path / "cluster.yaml")]
    assert main(["plan", str(tmp_path / "job.yaml"), *others, option, ""]) == 2
    assert "found an empty path; expected that of a file" in capsys.readouterr().err
