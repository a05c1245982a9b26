"""Tests of the embedded cluster from creation to removal: nodes, DNS, volumes, quotas, crashes and cleanup."""

import ipaddress
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster.embedded import processes
from devcluster.embedded.nodes import cgroups
from devcluster.embedded.state import State
from devcluster.kubernetes.release import default_release
from devcluster.paths import cluster_dir

pytestmark = pytest.mark.cluster

NAME = "lifecycle"
NODES = ["--node", "device=cpu-fast,cpu=0.8", "--node", "device=cpu-slow,cpu=0.2", "--node", "gpu=Tesla-T4:4"]
UID = 54321
PODS = 3

# Each pod contacts its peers by name before they are ready, shares a file with them, and uses CPU time.
BODY = """
import json, os, pathlib, socket, time
shared, began = pathlib.Path("/shared"), time.monotonic()
(shared / socket.gethostname()).write_text("here")
def wait_for(condition):
    while time.monotonic() < began + 60:
        try:
            found = condition()
        except OSError:
            found = None
        if found:
            return found
        time.sleep(0.02)
peers = wait_for(lambda: [socket.gethostbyname(f"peer-{i}.peers") for i in range(3)])
files = wait_for(lambda: names if len(names := sorted(os.listdir(shared))) == 3 else None)
wall, cpu = time.monotonic(), time.process_time()
while time.process_time() - cpu < 0.5:
    sum(range(10000))
rate = (time.process_time() - cpu) / (time.monotonic() - wall)
try:
    pathlib.Path("/opt/written").write_text("")
    root = "writable"
except OSError as refusal:
    root = refusal.strerror
print(json.dumps({"peers": peers, "files": files, "cpus": rate, "uid": os.getuid(), "root": root}),
      flush=True)
time.sleep(600)
"""


def run(*words: str, check: bool = True, timeout_s: float = 300, text: str | None = None) -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Cluster:
    """hack/cluster as a user calls it, and kubectl for the cluster that it creates."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = State(cluster_dir(NAME), NAME)

    def hack(self, *words: str, check: bool = True) -> str:
        # With an empty cache, the first call builds Kubernetes, which takes minutes on two cores.
        return run(str(self.root / "hack" / "cluster"), *words, "--name", NAME, check=check, timeout_s=1800)

    def kubectl(self, *words: str, text: str | None = None) -> str:
        return run(*self.client, *words, text=text, timeout_s=90)

    @property
    def client(self) -> list[str]:
        record = self.state.read()
        assert record
        return [str(Path(record.binaries, "kubectl")), "--kubeconfig", str(self.state.kubeconfig)]

    def get(self, *words: str) -> Any:
        return json.loads(self.kubectl("get", *words, "--output=json"))

    def remains(self) -> dict[str, list[str]]:
        """Return everything on this machine that belongs to the cluster, by kind."""
        found = {
            "processes": [str(one) for one in self.state.processes.strays()],
            "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if NAME in line],
            "namespaces": [line for line in run("ip", "netns", "list").splitlines() if NAME in line],
            "cgroups": [str(tree) for tree in cgroups.detect().trees(self.state.prefix)],
            "links": [line for line in run("ip", "link", "show").splitlines() if NAME in line],
            "files": [str(self.state.folder)] if self.state.folder.exists() else [],
        }
        return {kind: things for kind, things in found.items() if things}


def eventually(condition: Callable[[], bool], what: str, limit_s: float = 60) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def image(root: Path) -> str:
    """Return the operator's image, which is small and has Python. It is built before `up`, so that nodes contain it."""
    return str(json.loads(run(str(root / "hack" / "images"), "operator", timeout_s=1200))["operator"])


@pytest.fixture(scope="module")
def cluster(root: Path, image: str) -> Iterator[Cluster]:
    one = Cluster(root)
    one.hack("down")
    assert one.remains() == {}
    one.hack("up", *NODES)
    yield one
    record = one.state.read()
    assert record is not None
    one.hack("down")
    assert one.remains() == {}, "`down` must remove everything"
    routes = [ipaddress.IPv4Network(r["dst"]) for r in json.loads(run("ip", "-j", "route", "show", "proto", "213"))]
    ours = [route for route in routes if any(route.subnet_of(range_) for range_ in record.ranges.all)]
    assert ours == [], "`down` must remove all routes"


def test_second_up_changes_nothing(cluster: Cluster) -> None:
    before = {name: cluster.state.processes.get(name) for name in cluster.state.processes.names()}
    assert cluster.hack("up", *NODES).strip() == str(cluster.state.kubeconfig)
    assert {name: cluster.state.processes.get(name) for name in cluster.state.processes.names()} == before


def test_kubelets_can_read_claims_before_the_authorizer_knows_their_pods(cluster: Cluster) -> None:
    who = ("--as", "system:node:n1", "--as-group", "system:nodes")
    for what in ("persistentvolumeclaims", "persistentvolumes"):
        assert cluster.kubectl("auth", "can-i", "get", what, *who).strip() == "yes"


def test_up_with_other_nodes_is_rejected(cluster: Cluster) -> None:
    done = subprocess.run(
        [cluster.root / "hack/cluster", "up", "--nodes", "2", "--name", NAME],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "runs with other options" in done.stderr
    assert "--recreate" in done.stderr


def test_status_and_kubeconfig_describe_the_cluster(cluster: Cluster) -> None:
    status = json.loads(cluster.hack("status"))
    assert status["provider"] == "embedded"
    assert status["running"] is True
    assert [node["ready"] for node in status["nodes"]] == [True] * 3
    release = f"v{default_release()}"
    assert json.loads(cluster.kubectl("version", "--output=json"))["serverVersion"]["gitVersion"] == release
    assert {node["status"]["nodeInfo"]["kubeletVersion"] for node in cluster.get("nodes")["items"]} == {release}
    words = [str(cluster.root / "hack" / "cluster"), "kubectl", "--name", NAME, "--", "version", "--output=json"]
    assert run(*words).count(f'"{release}"') == 2  # client and server
    assert cluster.hack("kubeconfig").strip() == status["kubeconfig"]
    config = json.loads(cluster.hack("kubeconfig", "--raw"))
    # After the cluster is removed, clients must not call an address of another machine.
    assert config["clusters"][0]["cluster"]["server"].startswith("https://127.0.0.1:")


def test_nodes_have_the_requested_resources(cluster: Cluster) -> None:
    fast, slow, gpu = cluster.get("nodes")["items"]
    assert fast["metadata"]["labels"]["dljob.dev/device"] == "cpu-fast"
    assert fast["status"]["allocatable"]["cpu"] == "800m"
    assert slow["status"]["allocatable"]["cpu"] == "200m"
    assert gpu["status"]["allocatable"]["nvidia.com/gpu"] == "4"
    assert gpu["metadata"]["labels"]["nvidia.com/gpu.product"] == "Tesla-T4"
    (storage_class,) = cluster.get("storageclasses")["items"]
    assert storage_class["metadata"]["annotations"]["storageclass.kubernetes.io/is-default-class"] == "true"


def test_pods_on_all_nodes_reach_each_other(cluster: Cluster, image: str) -> None:
    cluster.kubectl(
        "apply", "--filename=-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": pods(image)})
    )
    try:
        reports = {name: _report(cluster, name) for name in (f"peer-{number}" for number in range(PODS))}
        placed = {one["metadata"]["name"]: one["spec"]["nodeName"] for one in cluster.get("pods")["items"]}
        addresses = [one["status"]["podIP"] for one in cluster.get("pods")["items"]]
        for report in reports.values():
            assert report["peers"] == addresses  # although no pod is ever ready
            assert report["files"] == sorted(reports)  # one volume, three nodes
            assert report["uid"] == UID
            assert report["root"] == "Read-only file system"
        assert sorted(placed.values()) == ["n1", "n2", "n3"]
        rates = {placed[name]: report["cpus"] for name, report in reports.items()}
        assert rates["n2"] < 0.3, "the node's quota is 0.2 cores"
        assert rates["n1"] < 0.9, "the node's quota is 0.8 cores"
        folders = list(cluster.state.volumes.iterdir())
        assert len(folders) == 1
    finally:
        cluster.kubectl("delete", "statefulset/peer", "service/peers", "--wait=false")
        cluster.kubectl("delete", "persistentvolumeclaim/shared", "--wait=false")
    eventually(lambda: not list(cluster.state.volumes.iterdir()), "the volume goes with its claim")
    eventually(lambda: cluster.get("persistentvolumes")["items"] == [], "the volume object too")


def _report(cluster: Cluster, pod: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def reported() -> bool:
        text = run(*(*cluster.client, "logs", pod), check=False, timeout_s=30).strip()
        if text:
            found.append(json.loads(text.splitlines()[-1]))
        return bool(found)

    eventually(reported, f"{pod} reports; pods: {cluster.kubectl('get', 'pods')}", limit_s=90)
    return found[0]


def pods(image: str) -> list[dict[str, Any]]:
    """Return a claim, a headless Service and a StatefulSet over all nodes, with the trainer's security settings."""
    labels = {"app": "peer"}
    container = {
        "name": "peer",
        "image": image,
        "command": ["python", "-c", BODY],
        "readinessProbe": {"exec": {"command": ["false"]}},
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    spread = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    pod = {
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
        "securityContext": {"runAsUser": UID, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [spread]}},
        "terminationGracePeriodSeconds": 0,
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "shared"},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "peers"},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels, "ports": [{"port": 1}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "peer"},
            "spec": {
                "serviceName": "peers",
                "replicas": PODS,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


def test_stopped_node_is_not_ready_and_returns(cluster: Cluster) -> None:
    cluster.hack("node", "stop", "n3")
    assert cgroups.detect().trees(f"{cluster.state.prefix}/n3") == []
    cluster.hack("node", "start", "n3")
    assert cluster.get("node", "n3")["status"]["allocatable"]["nvidia.com/gpu"] == "4"


def test_up_restarts_only_ended_processes(cluster: Cluster) -> None:
    cluster.kubectl("create", "configmap", "kept")
    registry = cluster.state.processes
    ended = {name: registry.get(name) for name in ("scheduler", "services", "node-n2")}
    kept = {name: registry.get(name) for name in registry.names() if name not in ended}
    processes.end([one for one in ended.values() if one], grace_s=0)
    cluster.hack("up", *NODES)
    assert {name: registry.get(name) for name in kept} == kept
    assert all(registry.get(name) not in (None, before) for name, before in ended.items())
    assert cluster.get("configmap", "kept")
    cluster.kubectl("create", "service", "clusterip", "fresh", "--tcp=80")
    eventually(lambda: _resolves(cluster, "fresh.default.svc.cluster.local"), "new names resolve", limit_s=20)


def _resolves(cluster: Cluster, name: str) -> bool:
    """Return True if the cluster's DNS answers a query for A records (RFC 1035, section 4.1) with at least one."""
    record = cluster.state.read()
    assert record
    question = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0\0\1\0\1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(1)
        try:
            client.sendto(struct.pack(">6H", 7, 0x0100, 1, 0, 0, 0) + question, (record.ranges.dns, 53))
            answer = client.recv(512)
        except OSError:
            return False
    _, _, _, answers, _, _ = struct.unpack(">6H", answer[:12])
    return bool(answers)


def test_disconnected_node_is_unreachable_until_it_is_reconnected(cluster: Cluster) -> None:
    address = json.loads(cluster.hack("status"))["nodes"][0]["address"]

    def answers() -> bool:
        try:
            socket.create_connection((address, 10250), timeout=1).close()
        except OSError:
            return False
        return True

    eventually(answers, "kubelet answers", limit_s=30)
    cluster.hack("node", "cut", "n1")
    assert not answers()
    cluster.hack("node", "heal", "n1")
    eventually(answers, "kubelet answers again", limit_s=30)


def test_slow_node_has_few_cpus_until_it_is_healed(cluster: Cluster) -> None:
    files = [
        tree / name
        for tree in cgroups.detect().trees(f"{cluster.state.prefix}/n1")
        for name in ("cpu.max", "cpu.cfs_quota_us")
    ]
    (file,) = (path for path in files if path.exists())

    def quota() -> str:
        return file.read_text().split()[0]

    before = quota()
    cluster.hack("node", "slow", "n1")
    assert 0 < int(quota()) <= 100_000 * (os.cpu_count() or 1) / 4
    cluster.hack("node", "heal", "n1")
    assert quota() == before


def test_up_works_after_all_processes_were_killed(cluster: Cluster) -> None:
    victims = list(cluster.state.processes.strays())
    assert len(victims) > 10
    for one in victims:
        processes.send(one, signal.SIGKILL)
    eventually(lambda: not any(map(processes.alive, victims)), "all of them are dead", limit_s=20)
    assert cluster.remains()
    cluster.hack("up", *NODES)
    assert [node["ready"] for node in json.loads(cluster.hack("status"))["nodes"]] == [True] * 3


def test_ctrl_c_during_up_stops_all_started_processes(root: Path, image: str) -> None:
    name = f"{NAME}-stopped"
    state = State(cluster_dir(name), name)
    command = [str(root / "hack" / "cluster"), "up", "--nodes", "1", "--name", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        seen = ""
        for line in process.stdout:
            seen += line
            if "API server ready ..." in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130, seen
    assert list(state.processes.strays()) == []
    assert not state.folder.exists()
    assert not Path("/run/netns", state.prefix).exists()
    assert cgroups.detect().trees(state.prefix) == []


def test_up_starts_controllers_again_that_did_not_wait_for_the_api_server(root: Path, image: str) -> None:
    name = f"{NAME}-slow"
    state = State(cluster_dir(name), name)
    hack = str(root / "hack" / "cluster")
    try:
        with subprocess.Popen(
            [hack, "up", "--nodes", "1", "--name", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout
            seen, ended = "", None
            for line in process.stdout:
                seen += line
                if "API server ready ..." in line:
                    ended = state.processes.get("controllers")
                    assert ended is not None, seen
                    processes.end([ended], grace_s=0)
            assert process.wait(timeout=60) == 0, seen
        assert ended is not None and state.processes.get("controllers") not in (None, ended)
    finally:
        run(hack, "down", "--name", name)
