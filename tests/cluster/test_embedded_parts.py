"""Tests of parts of the embedded cluster: DNS names, volumes, GPUs, quotas, certificates and address ranges."""

import ipaddress
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from devcluster.embedded.control_plane.pki import Authority
from devcluster.embedded.nodes import cgroups
from devcluster.embedded.services import dns, gpus, storage
from devcluster.embedded.state import SLOTS, Ranges

HEADLESS = {"metadata": {"name": "web", "namespace": "a"}, "spec": {"clusterIP": "None"}}
ENDPOINTS = {
    "metadata": {"name": "web", "namespace": "a"},
    "subsets": [
        {
            "addresses": [{"ip": "10.244.1.2", "hostname": "web-0"}],
            "notReadyAddresses": [{"ip": "10.244.2.2", "hostname": "web-1"}, {"ip": "10.244.3.2"}],
        }
    ],
}


def test_service_with_an_address_has_one_name() -> None:
    service = {"metadata": {"name": "api", "namespace": "a"}, "spec": {"clusterIP": "10.96.0.7"}}
    assert list(dns.records([service], [])) == ["10.96.0.7 api.a.svc.cluster.local"]


def test_headless_service_has_names_for_its_ready_pods() -> None:
    assert list(dns.records([HEADLESS], [ENDPOINTS])) == [
        "10.244.1.2 web-0.web.a.svc.cluster.local web.a.svc.cluster.local"
    ]


def test_unready_pods_have_names_if_the_service_publishes_them() -> None:
    service = {**HEADLESS, "spec": {"clusterIP": "None", "publishNotReadyAddresses": True}}
    assert [line.split()[:2] for line in dns.records([service], [ENDPOINTS])] == [
        ["10.244.1.2", "web-0.web.a.svc.cluster.local"],
        ["10.244.2.2", "web-1.web.a.svc.cluster.local"],
        ["10.244.3.2", "10-244-3-2.web.a.svc.cluster.local"],
    ]


def test_headless_service_without_pods_has_no_name() -> None:
    assert list(dns.records([HEADLESS], [{**ENDPOINTS, "subsets": None}])) == []


def claim(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "data", "namespace": "a", "uid": "u1"},
        "spec": {
            "storageClassName": storage.CLASS,
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            **spec,
        },
    }


@pytest.mark.parametrize(
    ("spec", "waiting"),
    [
        ({}, True),
        ({"volumeName": "pvc-u1"}, False),
        ({"storageClassName": "other"}, False),
        ({"storageClassName": None}, False),
        ({"volumeMode": "Block"}, False),
    ],
)
def test_claims_that_get_a_volume(spec: dict[str, Any], waiting: bool) -> None:
    assert storage.is_waiting(claim(**spec)) == waiting


def test_claim_that_is_being_deleted_gets_no_volume() -> None:
    leaving = claim()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not storage.is_waiting(leaving)


def test_volume_is_reserved_for_its_claim(tmp_path: Path) -> None:
    spec = storage.volume_for(claim(), tmp_path)["spec"]
    assert spec["claimRef"]["uid"] == "u1"
    assert spec["accessModes"] == ["ReadWriteMany"]
    assert spec["capacity"] == {"storage": "1Gi"}
    assert spec["hostPath"]["path"] == f"{tmp_path}/pvc-u1"


def test_gpus_are_advertised_until_the_node_shows_them() -> None:
    fresh = {"status": {"capacity": {"cpu": "2"}, "allocatable": {"cpu": "2"}}}
    assert gpus.patch_for(fresh, 2) == [
        {"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "2"},
        {"op": "add", "path": "/status/allocatable/nvidia.com~1gpu", "value": "2"},
    ]
    shown = {"status": {part: {"nvidia.com/gpu": "2"} for part in ("capacity", "allocatable")}}
    assert gpus.patch_for(shown, 2) == []
    reset = {"status": {"capacity": {"nvidia.com/gpu": "0"}, "allocatable": {"nvidia.com/gpu": "2"}}}
    assert [patch["path"] for patch in gpus.patch_for(reset, 2)] == ["/status/capacity/nvidia.com~1gpu"]
    assert gpus.patch_for({"status": {}}, 2) == []


@pytest.mark.parametrize(("cpus", "us"), [(0.2, 20_000), (0.8, 80_000), (2, 200_000), (0.01, 1_000)])
def test_quota_in_microseconds(cpus: float, us: int) -> None:
    assert cgroups.quota_us(cpus) == us


def test_cgroup_v2_delegates_controllers_and_limits_the_node(tmp_path: Path) -> None:
    """Ordinary files replace those of the kernel, since only names and values matter."""
    for folder in (tmp_path, tmp_path / "dljob-x", tmp_path / "dljob-x" / "n1"):
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.controllers").write_text("cpuset cpu memory pids misc\n")
    groups = cgroups.detect(tmp_path)
    assert isinstance(groups, cgroups.Unified)
    groups.create("dljob-x/n1", cpus=0.2, memory_nbytes=1 << 30)
    node = tmp_path / "dljob-x" / "n1"
    assert (node / "cpu.max").read_text() == "20000 100000"
    assert (node / "memory.max").read_text() == str(1 << 30)
    for folder in (tmp_path, tmp_path / "dljob-x", node):
        assert (
            folder / "cgroup.subtree_control"
        ).read_text() == "+pids"  # the last write, since each write is a command
    assert groups.trees("dljob-x") == [tmp_path / "dljob-x"]
    assert groups.trees("dljob-y") == []


def test_cgroup_v1_limits_the_node_in_each_hierarchy(tmp_path: Path) -> None:
    for name in ("cpu", "cpuset", "memory"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("")
    for name in ("cpuset.cpus", "cpuset.mems"):
        (tmp_path / "cpuset" / name).write_text("0-1\n")
    (tmp_path / "cpuacct").symlink_to("cpu")  # controllers that share a hierarchy
    groups = cgroups.detect(tmp_path)
    assert isinstance(groups, cgroups.Legacy)
    groups.create("dljob-x/n1", cpus=0.8, memory_nbytes=1 << 30)
    assert (tmp_path / "cpu/dljob-x/n1/cpu.cfs_quota_us").read_text() == "80000"
    assert (tmp_path / "memory/dljob-x/n1/memory.limit_in_bytes").read_text() == str(1 << 30)
    assert (tmp_path / "cpuset/dljob-x/n1/cpuset.cpus").read_text() == "0-1"
    assert len(groups.trees("dljob-x/n1")) == 3


def test_certificates_verify_and_kubeconfigs_contain_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    authority.create()
    authority.issue("server", "/O=system:nodes/CN=system:node:n1", ["IP:10.10.0.11", "DNS:n1"])
    authority.issue("client", "/CN=admin")
    for name in ("server", "client"):
        command = ["openssl", "verify", "-CAfile", str(authority.certificate), str(authority.folder / f"{name}.crt")]
        subprocess.run(command, check=True, capture_output=True, timeout=10)
    text = subprocess.run(
        ["openssl", "x509", "-in", authority.folder / "server.crt", "-noout", "-ext", "subjectAltName"],
        check=True,
        capture_output=True,
        text=True,
        timeout=10,
    ).stdout
    assert "IP Address:10.10.0.11" in text
    assert "DNS:n1" in text
    path = tmp_path / "kubeconfig"
    authority.write_kubeconfig(path, "client", "https://127.0.0.1:6443", context="dljob-dev")
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "pki").stat().st_mode & 0o777 == 0o700
    config = json.loads(path.read_text())
    assert config["current-context"] == "dljob-dev"
    assert config["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:6443"


def test_ranges_of_different_slots_never_overlap() -> None:
    networks = [network for slot in range(SLOTS) for network in Ranges(slot).all]
    networks.sort()
    assert all(not one.overlaps(two) for one, two in itertools.pairwise(networks))


def test_addresses_are_in_their_ranges() -> None:
    ranges = Ranges(3)
    for address in (ranges.control_plane, ranges.dns, ranges.node(1), ranges.node(50)):
        assert ipaddress.IPv4Address(address) in ranges.nodes
    assert ipaddress.IPv4Network(ranges.node_pods(50)).subnet_of(ranges.pods)
