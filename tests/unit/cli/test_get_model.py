"""Tests of ``dljob get-model`` against an API server over HTTP whose pods run their commands on this machine."""

import asyncio
import hashlib
import io
import json
import re
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from dljob.cli import entry, remote
from dljob.client import model_copy
from dljob.client.errors import BadInputError
from dljob.client.pod_exec import ExecError
from dljob.kube import Api
from dljob.kube.background import BackgroundLoop
from dljob.sdk import Client, DLJobError
from support.manifests.schema_validation import assert_valid
from support.servers.model_cluster import NAMESPACE, UID, Json, ModelCluster, job, stored_in_s3
from support.servers.threaded_api import kubeconfig


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelCluster]:
    """A cluster with a finished job, whose volume has two checkpoints. The command line connects to it."""
    folder = tmp_path / "volume" / f"digits-{UID}"
    for step in ("step-0000000200", "step-0000000300"):
        (folder / step).mkdir(parents=True)
        files = {"model.safetensors": step.encode() * 5000, "optimizer.safetensors": b"o", "state.json": b"{}"}
        for name, content in files.items():
            (folder / step / name).write_bytes(content)
        sums = {name: {"sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
        (folder / step / "manifest.json").write_text(json.dumps({"files": sums}))
    for name in ("report.json", "report.html", "predict.py", "model.json"):
        (folder / name).write_text(name)
    (folder / "logs").mkdir()
    (folder / "logs/rank-0.log").write_text("hello")
    (folder / "link").symlink_to("/etc/passwd")
    made = ModelCluster(tmp_path / "volume")

    @asynccontextmanager
    async def connected() -> AsyncIterator[Api]:
        async with made.serve() as url, aiohttp.ClientSession() as session:
            yield Api(session, url)

    monkeypatch.setattr(remote, "_api", connected)
    yield made
    assert not made.pods, "the pod is deleted in any case"


def get(folder: Path, *more: str) -> int:
    return entry.main(["get-model", "digits", str(folder), "-n", NAMESPACE, *more])


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_model_of_the_last_checkpoint_is_copied(
    cluster: ModelCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get(tmp_path / "new/model") == 0
    expected = ["manifest.json", "model.json", "model.safetensors", "predict.py", "report.html", "report.json"]
    assert names(tmp_path / "new/model") == expected
    assert (tmp_path / "new/model/model.safetensors").read_bytes() == b"step-0000000300" * 5000
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "new/model" / name) for name in expected]
    assert names(tmp_path / "new") == [f"model/{name}" for name in expected], "no temporary folder is left"


def test_whole_folder_of_the_job_is_copied(cluster: ModelCluster, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    assert get(tmp_path / "all", "--all") == 0
    found = names(tmp_path / "all")
    assert "logs/rank-0.log" in found and "step-0000000200/optimizer.safetensors" in found and len(found) >= 13
    assert not any(path.is_symlink() for path in (tmp_path / "all").rglob("*"))


def test_scripts_of_a_job_with_a_task_are_copied_too(cluster: ModelCluster, tmp_path: Path) -> None:
    assert cluster.job is not None
    cluster.job["status"]["suggestion"] = {"configMap": "digits-suggestion"}
    cluster.scripts = {"baseline.py": "b", "baseline.json": "{}", "predict.py": "other", "../evil.py": "e", "x.py": "x"}
    assert get(tmp_path / "model") == 0
    assert {"baseline.py", "baseline.json"} < set(names(tmp_path / "model"))
    assert (tmp_path / "model/predict.py").read_text() == "predict.py", "a file of the volume is not replaced"
    assert not {"x.py", "evil.py"} & set(names(tmp_path)) and not (tmp_path / "evil.py").exists()
    cluster.scripts = None
    assert get(tmp_path / "again") == 0, "the ConfigMap was deleted"


def test_pod_is_restricted_and_reads_only(cluster: ModelCluster, tmp_path: Path) -> None:
    assert cluster.job is not None
    cluster.job["spec"]["trainer"] |= {"imagePullSecrets": ["registry"], "imagePullPolicy": "Always"}
    assert get(tmp_path / "model", "--image", "other:2") == 0
    (body,) = cluster.created
    spec, (container,) = body["spec"], body["spec"]["containers"]
    assert (
        spec["securityContext"]["runAsNonRoot"]
        and spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    )
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert container["volumeMounts"][0]["readOnly"] and not spec["automountServiceAccountToken"]
    assert (container["image"], spec["imagePullSecrets"]) == ("other:2", [{"name": "registry"}])
    assert "tolerations" not in spec and spec["activeDeadlineSeconds"] > 0
    assert body["metadata"]["ownerReferences"][0]["uid"] == UID
    assert_valid(body)
    assert "dljob.dev/job" not in body["metadata"]["labels"], "the operator must not count it as a pod of the job"


def test_pod_tolerates_what_the_pods_of_the_job_tolerate(cluster: ModelCluster, tmp_path: Path) -> None:
    """Fixed bug: the command ended with a traceback for each job with overrides, and ignored ``spec.scheduling``."""
    pool, gpu = {"key": "pool", "operator": "Exists"}, {"key": "gpu", "operator": "Exists"}
    found = []
    for overrides in ([], [{"manager": "a"}], [{"manager": "a", "spec": {"tolerations": [gpu]}}]):
        cluster.job = job(scheduling={"tolerations": [pool]}, podTemplateOverrides=overrides)
        assert get(tmp_path / f"model-{len(found)}") == 0
        found.append(cluster.created[-1]["spec"]["tolerations"])
    assert found == [[pool], [pool], [gpu]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": None}, "JOB: found no DLJob digits in namespace team-a; expected an existing job"),
        ({"job": job("Running")}, "digits: found phase Running; expected a job that has ended"),
        ({"job": job(checkpoint=None)}, "digits: found no checkpoint in its status"),
        (
            {"job": stored_in_s3()},
            "digits: found spec.checkpoint.uri: s3://models/a; expected a job with a checkpoint volume. Copy the model",
        ),
        ({"job": stored_in_s3("s3://models/a/commits/2.json", "checkpoint-5")}, "recursive s3://models/a/digits-[^/ ]+ model"),
        ({"claim": False}, "digits: found no volume claim digits-checkpoints in namespace team-a; expected the claim"),
        ({"job": job(checkpoint="step-0000000400")}, "cannot copy .*step-0000000400 from claim .*: found no folder"),
        ({"exec_code": 403}, "cannot copy .*: the API server does not permit it; expected the permission"),
        ({"cut": 3000}, "cannot copy .*: the connection broke before all files were copied"),
        (
            {"pod_status": {"containerStatuses": [{"state": {"waiting": {"reason": "InvalidImageName", "message": "x"}}}]}},
            "pod digits-reader-.* does not run: InvalidImageName: x; expected it to run within",
        ),
        (
            {"pod_status": {"phase": "Failed", "message": "node has no disk"}},
            "pod digits-reader-.* does not run: node has no disk; expected it to run within",
        ),
        (
            {"pod_status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                            "message": "0/3 nodes"}]}},
            "pod digits-reader-.* does not run: Unschedulable: 0/3 nodes; expected it to run within 0 s",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(
    changes: Json, message: str, cluster: ModelCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in changes.items():
        setattr(cluster, name, value)
    late = ["--timeout", "0"] if "0 s" in message else []
    assert get(tmp_path / "model", *late) == 2
    errors = capsys.readouterr().err
    assert re.match(f"dljob: .*{message}", errors) and len(errors.splitlines()) == 1, errors
    assert not list(tmp_path.glob("*model*")), "nothing is left"


def test_job_without_checkpoints(cluster: ModelCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.job = {**job(), "spec": {"checkpoint": {"enabled": False}}}
    assert get(tmp_path / "model") == 2
    assert "digits: found spec.checkpoint.enabled: false; expected a job with checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("last", "options", "source"),
    [
        (f"s3://models/a/digits-{UID}/step-0000000300", [], f"s3://models/a/digits-{UID}/step-0000000300"),
        (f"s3://models/a/digits-{UID}/step-0000000300", ["--all"], f"s3://models/a/digits-{UID}"),
        (None, [], f"s3://models/a/digits-{UID}"),
    ],
    ids=["last checkpoint", "all", "written by the script"],
)
def test_command_for_an_object_store_copies_only_this_job(
    last: str | None,
    options: list[str],
    source: str,
    cluster: ModelCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fixed bug: without a checkpoint of dltrain, the command would have copied all jobs of the bucket."""
    cluster.job = stored_in_s3(last)
    assert get(tmp_path / "model", *options) == 2
    assert f"aws s3 cp --recursive {source} model\n" in capsys.readouterr().err
    cluster.job["spec"]["parallelism"] = {"strategy": "Sharded"}
    assert get(tmp_path / "model", *options) == 2
    told = capsys.readouterr().err
    assert f"aws s3 cp --recursive {source} model\n" in told and told.count("\n") == 1
    assert ("dltrain.checkpoint.sharded.export model model.safetensors" in told) is not bool(options)


@pytest.mark.parametrize("kind", ["link", "broken link", "mount point", "current folder"])
def test_folder_that_cannot_be_replaced_is_rejected(
    kind: str,
    cluster: ModelCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fixed bug: a link to an empty folder, or the mount point of one, ended the command with a traceback."""
    (tmp_path / "empty").mkdir()
    folder = tmp_path / ("empty" if kind == "mount point" else "model")
    if kind.endswith("link"):
        folder.symlink_to(tmp_path / ("empty" if kind == "link" else "missing"))
    elif kind == "mount point":
        monkeypatch.setattr(Path, "is_mount", lambda _: True)
    else:
        monkeypatch.chdir(tmp_path / "empty")
        folder = Path()
    assert get(folder) == 2 and not cluster.created
    assert "which is a link, a mount point or a relative path to an existing folder; " in capsys.readouterr().err
    assert (tmp_path / "empty").is_dir()


def test_folder_of_the_user_remains_if_the_copy_fails(cluster: ModelCluster, tmp_path: Path) -> None:
    """Fixed bug: the command deleted an empty folder before it copied files."""
    (tmp_path / "model").mkdir(mode=0o750)
    before = (tmp_path / "model").stat()
    cluster.cut = 3000
    assert get(tmp_path / "model") == 2
    after = (tmp_path / "model").stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode) and not names(tmp_path / "model")
    cluster.cut = None
    assert get(tmp_path / "model") == 0 and "model.safetensors" in names(tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode == before.st_mode


def test_folder_that_is_not_empty_is_rejected(cluster: ModelCluster, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine").touch()
    assert get(tmp_path / "model") == 2 and names(tmp_path / "model") == ["mine"]


def test_damaged_file_is_rejected(cluster: ModelCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster.volume / f"digits-{UID}/step-0000000300/model.safetensors").write_bytes(b"damaged")
    assert get(tmp_path / "model") == 2
    assert capsys.readouterr().err.startswith("dljob: model.safetensors: found SHA-256 ")
    assert not (tmp_path / "model").exists()


def test_file_that_has_not_arrived_is_noticed(
    cluster: ModelCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster.volume / f"digits-{UID}/step-0000000300/model.safetensors").unlink()
    assert get(tmp_path / "model") == 2 and not (tmp_path / "model").exists()
    assert "model.safetensors has not arrived" in capsys.readouterr().err


def write_parts(folder: Path, *, whole: bool) -> dict[str, Any]:
    """Write a sharded checkpoint of two ranks, with the whole model in one file if ``whole`` is true."""
    model = {"w": np.arange(15, dtype=np.float32).reshape(5, 3), "n": np.array(7), "none": np.empty((0, 2), np.float16)}
    parts = [{"w": model["w"][:3], "n": model["n"], "none": model["none"]}, {"w": model["w"][3:]}]
    files = {f"model-part-0000{rank}.safetensors": save(own) for rank, own in enumerate(parts)}
    a, b = files
    rows: dict[str, Any] = {"w": ["F32", [5, 3], [[b, 3, 2], [a, 0, 3]]], "n": ["I64", [], [[a, 0, 1]]]}
    rows["none"] = ["F16", [0, 2], [[a, 0, 0]]]
    files |= {f"optimizer-part-0000{rank}.safetensors": b"o" for rank in range(2)} | {"state.json": b"{}"}
    files |= {"model.safetensors": save(model)} if whole else {}
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sums = {name: {"sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    manifest = {"files": sums, "parts": {"model.safetensors": rows}}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))
    return model


@pytest.mark.parametrize("whole", [True, False])
def test_model_of_a_sharded_checkpoint_is_one_file(
    cluster: ModelCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    model = write_parts(cluster.volume / f"digits-{UID}/step-0000000300", whole=whole)
    assert get(tmp_path / "model") == 0
    expected = ["manifest.json", "model.json", "model.safetensors", "predict.py", "report.html", "report.json"]
    assert names(tmp_path / "model") == expected
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "model" / name) for name in expected]
    found = load_file(tmp_path / "model/model.safetensors")
    assert found.keys() == model.keys()
    assert all(found[key].dtype == part.dtype and np.array_equal(found[key], part) for key, part in model.items())


@pytest.mark.parametrize(
    "damage", ["missing", "changed", "manifest", "repeated", "order", "row missing", "path", "type"]
)
def test_damaged_parts_are_rejected(
    cluster: ModelCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = cluster.volume / f"digits-{UID}/step-0000000300"
    write_parts(folder, whole=False)
    part, path = folder / "model-part-00001.safetensors", folder / "manifest.json"
    manifest = json.loads(path.read_text())
    if damage != "order":  # These are found in manifests of older versions, too, which have no hash.
        del manifest["sha256"]
    if damage == "missing":
        part.unlink()
    elif damage == "changed":
        part.write_bytes(b"damaged")
    elif damage == "manifest":
        manifest["parts"]["model.safetensors"]["w"][1] = [7, 3]
    elif damage == "order":
        manifest["parts"]["model.safetensors"]["w"][2][0][1] = 0  # from row 3 on
        manifest["parts"]["model.safetensors"]["w"][2][1][1] = 2
    elif damage == "repeated":
        manifest["parts"]["model.safetensors"]["w"][2] *= 2
    elif damage == "row missing":
        manifest["parts"]["model.safetensors"]["w"][2].pop()
    elif damage == "path":
        manifest["parts"]["model.safetensors"]["n"][2][0][0] = "../state.json"
    else:
        manifest["parts"]["model.safetensors"]["n"][0] = "I4"
    path.write_text(json.dumps(manifest))
    assert get(tmp_path / "model") == 2 and not (tmp_path / "model").exists()
    told = {"missing": f"{part.name} has not arrived", "changed": f"{part.name}: found SHA-256"}
    assert told.get(damage, "manifest.json: found parts that do not fit the files") in capsys.readouterr().err


def test_image_comes_from_the_operator_if_the_job_names_none(cluster: ModelCluster, tmp_path: Path) -> None:
    cluster.job = {**job(), "spec": {}}
    assert get(tmp_path / "model") == 2 and not cluster.created, "without an operator, the image is unknown"
    cluster.operator_image = "trainer:3"
    assert get(tmp_path / "model") == 0
    assert cluster.created[0]["spec"]["containers"][0]["image"] == "trainer:3"


def test_pod_of_another_user_does_not_choose_the_image(
    cluster: ModelCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fixed bug: any pod with the label of an operator chose the image that read the volumes of other users."""
    cluster.job, cluster.operator_image, cluster.false_operator_image = {**job(), "spec": {}}, "trainer:3", "attack:1"
    assert get(tmp_path / "model") == 2 and not cluster.created
    assert "attack:1 in team-b/dljob-0, trainer:3 in dljob-system/dljob-0" in capsys.readouterr().err


def test_pod_has_the_administrators_defaults(cluster: ModelCluster, tmp_path: Path) -> None:
    """Fixed bug: the pod of a job whose pull secret is a default could not pull its image from a private registry."""
    cluster.operator_image = "trainer:3"
    taint = {"key": "pool", "operator": "Exists"}
    scheduling = {"tolerations": [taint], "runtimeClassName": "gvisor"}
    cluster.defaults = json.dumps({"trainer": {"imagePullSecrets": ["registry"]}, "scheduling": scheduling})
    assert get(tmp_path / "model") == 0
    cluster.job = job(scheduling={"tolerations": [taint]})
    cluster.job["spec"]["trainer"]["imagePullSecrets"] = ["own"]
    assert get(tmp_path / "again") == 0
    cluster.defaults = json.dumps({"of": "a later release"})
    assert get(tmp_path / "later") == 0
    keys = ("imagePullSecrets", "tolerations", "runtimeClassName")
    assert [tuple(body["spec"].get(key) for key in keys) for body in cluster.created] == [
        ([{"name": "registry"}], [taint], "gvisor"),
        ([{"name": "own"}], [taint], "gvisor"),
        ([{"name": "own"}], [taint], None),
    ]
    assert_valid(cluster.created[0])


def test_sdk_copies_the_model(cluster: ModelCluster, tmp_path: Path) -> None:
    with BackgroundLoop("api-server") as loop:
        serving = cluster.serve()
        url = loop.call(serving.__aenter__())
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(kubeconfig(url, NAMESPACE)))
        with Client(kubeconfig=path) as client:
            paths = client.job("digits").model(tmp_path / "new/model")
            assert tmp_path / "new/model/model.safetensors" in paths and all(each.is_file() for each in paths)
            with pytest.raises(DLJobError, match="not empty"):
                client.job("digits").model(tmp_path / "new/model")
        loop.call(serving.__aexit__(None, None, None))


def test_paths_that_leave_the_folder_are_left_out(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w|") as archive:
        for name in ("../outside", "/absolute", "inside/a", "b"):
            entry_ = tarfile.TarInfo(name)
            entry_.size = 1
            archive.addfile(entry_, io.BytesIO(b"x"))

    async def parts(data: bytes) -> AsyncIterator[bytes]:
        yield data

    assert asyncio.run(model_copy.receive(parts(buffer.getvalue()), tmp_path / "new")) == ["b", "inside/a"]
    assert names(tmp_path) == ["new/b", "new/inside/a"]
    with pytest.raises((ExecError, BadInputError)):
        asyncio.run(model_copy.receive(parts(b"no archive" * 100), tmp_path / "other"))
    assert names(tmp_path) == ["new/b", "new/inside/a"]
