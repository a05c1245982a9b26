"""Tests of the kind provider, which record the commands it runs and their input."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devcluster.errors import ClusterError
from devcluster.images.oci_layout import Layout
from devcluster.kind.provider import VOLUMES, Kind, cluster_config, storage_objects
from devcluster.model import ClusterSpec, parse_cluster
from devcluster.progress import Progress

# Records its name, arguments and input as a JSON line, and prints the file that is named after its first words.
RECORDER = """#!/usr/bin/env -S python3 -IS
import json, os, pathlib, sys
home = pathlib.Path(os.environ["RECORDS"])
name = pathlib.Path(sys.argv[0]).name
text = sys.stdin.read() if "--interactive" in sys.argv else ""
with (home / "calls").open("a") as calls:
    calls.write(json.dumps([name, *sys.argv[1:], *([text] if text else [])]) + "\\n")
line = " ".join([name, *sys.argv[1:]])
if line.startswith("kind create cluster"):
    (home / "kind get clusters").write_text("dljob-test\\n")
    pathlib.Path(sys.argv[sys.argv.index("--kubeconfig") + 1]).write_text("kubeconfig")
    sys.exit(int(os.environ.get("CREATE_EXIT", "0")))
if line.startswith("kind delete cluster"):
    (home / "kind get clusters").unlink()
for answer in sorted(home.iterdir(), key=lambda path: -len(path.name)):
    if line.startswith(answer.name) or answer.name in line:
        print(answer.read_text(), end="")
        break
"""


class Recorded:
    """The recorded calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def lines(self, start: str) -> list[str]:
        return [" ".join(call) for call in self.calls if " ".join(call).startswith(start)]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    programs, records = tmp_path / "bin", tmp_path / "records"
    programs.mkdir()
    records.mkdir()
    for name in ("docker", "kind"):
        program = programs / name
        program.write_text(RECORDER)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORDS", str(records))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DLJOB_CLUSTER_DIR", raising=False)
    return Recorded(records)


@pytest.fixture
def kind(recorded: Recorded) -> Kind:
    return Kind("test", Progress(quiet=True))


def spec(*nodes: str) -> ClusterSpec:
    return parse_cluster("test", nodes, None)


def test_up_creates_the_nodes_with_labels_and_a_shared_folder(kind: Kind, recorded: Recorded) -> None:
    kind.up(spec("device=cpu-fast", "device=cpu-slow"), recreate=False)
    (create,) = recorded.lines("kind create cluster")
    assert "--name dljob-test" in create
    assert "--wait 180s" in create
    assert kind.kubeconfig().read_text() == "kubeconfig"
    config = json.loads((kind.kubeconfig().parent / "kind-config.json").read_text())
    assert [node["role"] for node in config["nodes"]] == ["control-plane", "worker", "worker"]
    assert config["nodes"][2]["labels"]["dljob.dev/device"] == "cpu-slow"
    assert {node["labels"]["dljob.dev/machine"] for node in config["nodes"][1:]} == {"development-machine"}
    mounts = [node["extraMounts"] for node in config["nodes"]]
    assert mounts == [mounts[0]] * 3
    assert Path(mounts[0][0]["hostPath"]).is_dir()
    assert "image" not in config["nodes"][0]  # the default of kind, which is pinned by digest


def test_release_and_feature_gates_are_passed_to_kind(kind: Kind) -> None:
    wanted = replace(spec(""), kubernetes="1.35.4", feature_gates="A=true,B=false", runtime_config="api/alpha=true")
    kind.up(wanted, recreate=False)
    config = json.loads((kind.kubeconfig().parent / "kind-config.json").read_text())
    assert {node["image"] for node in config["nodes"]} == {"kindest/node:v1.35.4"}
    assert config["featureGates"] == {"A": True, "B": False}
    assert config["runtimeConfig"] == {"api/alpha": "true"}


def test_folder_of_programs_is_rejected_by_kind(kind: Kind) -> None:
    with pytest.raises(ClusterError, match="--kubernetes: found the folder /opt/kubernetes with --provider kind"):
        kind.up(replace(spec(""), kubernetes="/opt/kubernetes"), recreate=False)


def test_quota_is_set_on_the_container_of_the_node(kind: Kind, recorded: Recorded) -> None:
    kind.up(spec("cpu=0.8", "cpu=0.2,memory=1Gi", ""), recreate=False)
    assert recorded.lines("docker update") == [
        "docker update --cpus 0.8 dljob-test-worker",
        "docker update --cpus 0.2 dljob-test-worker2",
        "docker update --memory 1073741824 --memory-swap 1073741824 dljob-test-worker2",
    ]


def test_gpus_are_patched_into_the_status_of_the_node(kind: Kind, recorded: Recorded) -> None:
    kind.up(spec("", "gpu=Tesla-T4:4"), recreate=False)
    (patch,) = [call for call in recorded.calls if "patch" in call]
    assert patch[:3] == ["docker", "exec", "dljob-test-control-plane"]
    assert patch[5:8] == ["patch", "node", "dljob-test-worker2"]
    assert "--subresource=status" in patch
    operations = json.loads(patch[-1].removeprefix("--patch="))
    assert {(one["path"], one["value"]) for one in operations} == {
        ("/status/capacity/nvidia.com~1gpu", "4"),
        ("/status/allocatable/nvidia.com~1gpu", "4"),
    }


def test_default_storage_class_is_the_shared_one(kind: Kind, recorded: Recorded) -> None:
    kind.up(spec(""), recreate=False)
    assert len([line for line in recorded.lines("docker exec") if "is-default-class-" in line]) == 1
    (applied,) = [call for call in recorded.calls if "apply" in call]
    assert "--interactive" in applied
    assert json.loads(applied[-1]) == storage_objects()


def test_second_up_only_replaces_released_volumes(kind: Kind, recorded: Recorded) -> None:
    kind.up(spec(""), recreate=False)
    volumes = [
        _volume("dljob-shared-00", "Bound"),
        _volume("dljob-shared-01", "Released"),
        _volume("x", "Released", "y"),
    ]
    (recorded.folder / "get persistentvolumes").write_text(json.dumps({"items": volumes}))
    kind.up(spec(""), recreate=False)
    assert len(recorded.lines("kind create cluster")) == 1
    deleted = [call[5:] for call in recorded.calls if "delete" in call and "exec" in call]
    assert deleted == [["delete", "persistentvolume", "dljob-shared-01"]]
    script = recorded.lines("docker exec dljob-test-control-plane sh -c")[-1]
    assert "rm -rf /var/lib/dljob-volumes/dljob-shared-01;" in script
    assert "dljob-shared-00;" not in script


def _volume(name: str, phase: str, storage_class: str = "dljob-shared") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"storageClassName": storage_class}, "status": {"phase": phase}}


def test_up_with_other_nodes_is_rejected_unless_recreated(kind: Kind, recorded: Recorded) -> None:
    kind.up(spec(""), recreate=False)
    with pytest.raises(ClusterError, match="add --recreate"):
        kind.up(spec("", ""), recreate=False)
    kind.up(spec("", ""), recreate=True)
    assert len(recorded.lines("kind delete cluster")) == 1
    assert len(recorded.lines("kind create cluster")) == 2


def test_failed_up_leaves_nothing(kind: Kind, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREATE_EXIT", "1")
    with pytest.raises(ClusterError, match=r"kind create cluster.*: found exit status 1"):
        kind.up(spec(""), recreate=False)
    assert len(recorded.lines("kind delete cluster")) == 1
    assert not (recorded.folder.parent / "cache/dljob/cluster/test").exists()


def test_down_removes_files_of_pods_and_then_the_cluster(kind: Kind, recorded: Recorded) -> None:
    kind.up(spec(""), recreate=False)
    folder = kind.kubeconfig().parent
    kind.down()
    tail = [" ".join(call) for call in recorded.calls][-3:]
    assert tail[1] == "docker exec dljob-test-control-plane sh -c rm -rf /var/lib/dljob-volumes/*"
    assert tail[2].startswith("kind delete cluster --name dljob-test")
    assert not folder.exists()
    kind.down()
    assert len(recorded.lines("kind delete cluster")) == 1


def test_load_accepts_archives_and_layouts(kind: Kind, recorded: Recorded, tmp_path: Path) -> None:
    kind.up(spec(""), recreate=False)
    program = tmp_path / "hello"
    program.write_text("hello")
    layout = Layout(tmp_path / "layout")
    layout.add_program("localhost/hello:1", program)
    kind.load([tmp_path / "image.tar", layout.folder])
    first, second = recorded.lines("kind load image-archive")
    assert first == f"kind load image-archive {tmp_path}/image.tar --name dljob-test"
    assert second.split()[3].endswith("/images.tar")


def test_nodes_are_stopped_and_disconnected_by_both_names(kind: Kind, recorded: Recorded) -> None:
    kind.up(spec("", ""), recreate=False)
    (recorded.folder / "docker inspect").write_text("172.18.0.4\n")
    kind.node("stop", "n2")
    kind.node("start", "dljob-test-worker2")
    kind.node("cut", "n1")
    kind.node("heal", "n1")
    kind.node("slow", "n2")
    kind.node("heal", "n2")
    cpus = os.cpu_count() or 1
    wanted = ("docker kill", "docker start", "docker network", "docker update --cpus")
    assert [" ".join(call) for call in recorded.calls if " ".join(call).startswith(wanted)] == [
        "docker kill dljob-test-worker2",
        "docker start dljob-test-worker2",
        "docker network disconnect kind dljob-test-worker",
        "docker network connect --ip 172.18.0.4 kind dljob-test-worker",
        f"docker update --cpus {cpus} dljob-test-worker",
        f"docker update --cpus {cpus / 4:.2f} dljob-test-worker2",
        f"docker update --cpus {cpus} dljob-test-worker2",
    ]
    with pytest.raises(ClusterError, match="node 'n3': found no such node"):
        kind.node("stop", "n3")


def test_status_and_kubeconfig_of_a_missing_cluster(kind: Kind) -> None:
    assert kind.status()["running"] is False
    with pytest.raises(ClusterError, match="is not running: run hack/cluster up"):
        kind.kubeconfig()


def test_every_static_volume_can_be_shared() -> None:
    _, *volumes = storage_objects()["items"]
    assert len({volume["metadata"]["name"] for volume in volumes}) == VOLUMES
    assert all("ReadWriteMany" in volume["spec"]["accessModes"] for volume in volumes)
    mount = cluster_config(spec(""), Path("/x"))["nodes"][0]["extraMounts"][0]["containerPath"]
    assert all(volume["spec"]["hostPath"]["path"].startswith(mount + "/") for volume in volumes)
