"""Start, find and stop nodes, and write the configuration of their containerd, kubelet and kube-proxy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from devcluster.embedded.control_plane.commands import API_PORT, gates, python_module
from devcluster.embedded.nodes import cgroups
from devcluster.embedded.nodes.image_seed import PAUSE_IMAGE, plant
from devcluster.embedded.processes import Identity, children, end, identify, wait_until
from devcluster.embedded.services.api import Object
from devcluster.embedded.state import Record, State
from devcluster.errors import ClusterError
from devcluster.kubernetes.release import Release, parse_release
from devcluster.model import SLOW, NodeSpec
from devcluster.shell import find

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
_RESERVED_NBYTES = 1 << 30  # memory of the machine for the control plane and the user
_CAP_SYS_RESOURCE = 24
# Kernel settings that kubelet changes for the whole machine at its start (pkg/kubelet/cm: setupKernelTunables).
_KUBELET_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}

_VOLUMES = "dljob-cluster-nodes-volumes"
ROLE: Object = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": _VOLUMES},
    "rules": [{"apiGroups": [""], "resources": ["persistentvolumeclaims", "persistentvolumes"], "verbs": ["get"]}],
}
BINDING: Object = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": _VOLUMES},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": _VOLUMES},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}],
}
"""Permissions that the node authorizer also grants, but only after it knows on which nodes pods run.

Without this binding, the API server may reject a kubelet's first request about the volumes of a new pod. The
kubelet then retries only after 10 to 15 s, which delayed the first job of a busy cluster.
"""


def process_name(node: NodeSpec) -> str:
    """Return the name under which the Registry records the process that starts the node (nsenter and unshare)."""
    return f"node-{node.name}"


def start(state: State, record: Record, node: NodeSpec) -> None:
    """Start the node in its namespaces. Return immediately; the node becomes Ready later."""
    number = record.spec.nodes.index(node) + 1
    folder = state.node_folder(node)
    for name in ("kubelet", "cni", "var-log", "var-lib"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "containerd").exists():
        plant(folder / "containerd")
    groups = cgroups.detect()
    cgroups.remove(groups, state.cgroup(node))
    groups.create(state.cgroup(node), node.cpus, node.memory_nbytes)
    (folder / "resolv.conf").write_text(f"nameserver {record.ranges.dns}\n")
    (folder / "cni" / "10-ptp.conflist").write_text(json.dumps(_cni(record, number, folder), indent=1))
    (folder / "containerd.toml").write_text(_containerd_toml(folder))
    (folder / "kubelet.json").write_text(json.dumps(_kubelet_config(state, record, node), indent=1))
    (folder / "node.json").write_text(json.dumps(_init_config(state, record, node), indent=1))
    command = [
        *("nsenter", f"--net=/run/netns/{state.netns(node)}"),
        *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--propagation", "private"),
        *python_module("nodes.init", str(folder / "node.json")),
    ]
    state.processes.start(process_name(node), command, state.logs / f"{node.name}-init.log")


def init_process(state: State, node: NodeSpec) -> Identity | None:
    """Return the process that is PID 1 in the node, with its PID on this machine; None if the node does not run."""
    outer = state.processes.get(process_name(node))
    inner = children(outer.pid) if outer else []
    return identify(inner[0]) if inner else None


def stop(state: State, node: NodeSpec) -> None:
    """Kill all processes of the node, as a power failure would. Return when all of them have ended."""
    inner = init_process(state, node)
    if inner:
        end([inner], grace_s=0)
    state.processes.end([process_name(node)], grace_s=2 if inner else 0)
    cgroups.remove(cgroups.detect(), state.cgroup(node))


def set_slow(state: State, node: NodeSpec, *, slow: bool) -> None:
    """Give the node its part ``SLOW`` of its CPUs, or all of them again."""
    cpus = SLOW * (node.cpus or os.cpu_count() or 1) if slow else node.cpus
    cgroups.detect().limit_cpus(state.cgroup(node), cpus)


def containerd_address(state: State, node: NodeSpec, timeout_s: float = 30) -> str:
    """Return the address of the node's containerd on this machine. Raise ClusterError if containerd does not start."""

    def path() -> Path | None:
        inner = init_process(state, node)
        return Path(f"/proc/{inner.pid}/root{CONTAINERD_SOCKET}") if inner else None

    if not wait_until(lambda: (found := path()) is not None and found.exists(), timeout_s):
        raise ClusterError(
            f"containerd of node {node.name}: found no socket {timeout_s:g} s after its start; expected containerd to "
            f"run. See its log {state.logs / node.name}-containerd.log"
        )
    return str(path())


def _init_config(state: State, record: Record, node: NodeSpec) -> dict[str, Any]:
    folder, log = state.node_folder(node), state.logs / node.name
    number = record.spec.nodes.index(node) + 1
    kubelet = [
        str(Path(record.binaries, "kubelet")),
        f"--config={folder / 'kubelet.json'}",
        f"--kubeconfig={state.pki / f'node-{node.name}.kubeconfig'}",
        f"--hostname-override={node.name}",
        f"--node-ip={record.ranges.node(number)}",
        f"--container-runtime-endpoint=unix://{CONTAINERD_SOCKET}",
        f"--root-dir={folder / 'kubelet'}",
        "--housekeeping-interval=15s",
        "--node-labels="
        + ",".join(
            f"{key}={value}" for key, value in {**node.labels, "topology.kubernetes.io/zone": node.name}.items()
        ),
        *gates(record),
    ]
    proxy = [
        str(Path(record.binaries, "kube-proxy")),
        f"--kubeconfig={state.pki / 'proxy.kubeconfig'}",
        f"--hostname-override={node.name}",
        "--proxy-mode=iptables",
        "--iptables-min-sync-period=100ms",
        f"--cluster-cidr={record.ranges.pods}",
        # Limits of the connection table apply to the whole machine, not to a namespace.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        *gates(record),
    ]
    containerd = [find("containerd") or "containerd", "--config", str(folder / "containerd.toml")]
    return {
        "name": node.name,
        "binds": {str(folder / "var-log"): "/var/log", str(folder / "var-lib"): "/var/lib"},
        "sysctls_shown": {name: value for name, value in _KUBELET_SYSCTLS.items() if Path("/proc/sys", name).exists()},
        "sysctls": {"net/ipv4/ip_forward": 1},
        "containerd_socket": CONTAINERD_SOCKET,
        "api": [record.ranges.control_plane, API_PORT, str(state.pki / "ca.crt")],
        "daemons": [
            {"command": containerd, "log": f"{log}-containerd.log", "after": ""},
            {"command": proxy, "log": f"{log}-kube-proxy.log", "after": "api"},
            {"command": kubelet, "log": f"{log}-kubelet.log", "after": "containerd"},
        ],
    }


def _kubelet_config(state: State, record: Record, node: NodeSpec) -> dict[str, Any]:
    pki, total = state.pki, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpus = os.cpu_count() or 1
    # All nodes together must not report more memory than the machine has.
    memory = node.memory_nbytes or (total - _RESERVED_NBYTES) // len(record.spec.nodes)
    reserved = {"memory": f"{max(0, total - memory) >> 20}Mi"}
    if node.cpus is not None:
        reserved["cpu"] = f"{max(0, round((cpus - node.cpus) * 1000))}m"
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / f"node-{node.name}.crt"),
        "tlsPrivateKeyFile": str(pki / f"node-{node.name}.key"),
        "cgroupDriver": "cgroupfs",
        **_cgroup_v1_allowed(record),
        "cgroupRoot": f"/{state.cgroup(node)}",
        # If the node has a CPU quota, pods get none: cgroup v1 rejects a quota of a pod above that of its parent.
        "cpuCFSQuota": node.cpus is None,
        "enforceNodeAllocatable": ["pods"],
        "systemReserved": reserved,
        "clusterDNS": [record.ranges.dns],
        "clusterDomain": "cluster.local",
        "resolvConf": str(state.node_folder(node) / "resolv.conf"),
        "failSwapOn": False,
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "syncFrequency": "5s",
        "fileCheckFrequency": "20s",
        "httpCheckFrequency": "20s",
        "nodeStatusUpdateFrequency": "1s",
        "volumeStatsAggPeriod": "5m",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "maxPods": 100,
    }


def _cgroup_v1_allowed(record: Record) -> dict[str, Any]:
    """Return the kubelet setting that allows cgroup v1; empty for releases before 1.31, which do not have it."""
    known = parse_release(record.release) >= Release(1, 31, 0)
    return {"failCgroupV1": False} if known else {}


def _cni(record: Record, number: int, folder: Path) -> dict[str, Any]:
    # Point-to-point links: every packet of a pod is routed by its node, so services work without br_netfilter.
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": record.ranges.node_pods(number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(folder / "cni" / "addresses"),
    }
    return {
        "cniVersion": "0.4.0",
        "name": "dljob",
        "plugins": [
            {"type": "ptp", "ipMasq": False, "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _containerd_toml(folder: Path) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return "\n".join(
        [
            "version = 2",
            f"root = {json.dumps(str(folder / 'containerd'))}",
            'state = "/run/containerd/state"',
            "[grpc]",
            f"address = {json.dumps(CONTAINERD_SOCKET)}",
            f"[{cri}]",
            f"sandbox_image = {json.dumps(PAUSE_IMAGE)}",
            f"restrict_oom_score_adj = {json.dumps(not _may_raise_limits())}",
            f"[{cri}.cni]",
            'bin_dir = "/usr/lib/cni"',
            f"conf_dir = {json.dumps(str(folder / 'cni'))}",
            f"[{cri}.containerd.runtimes.runc]",
            'runtime_type = "io.containerd.runc.v2"',
            "",
        ]
    )


def _may_raise_limits() -> bool:
    """Return True if the capability bounding set of this process contains CAP_SYS_RESOURCE, or if it is unknown.

    Without this capability, runc cannot lower the oom_score_adj of a pod's sandbox.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return True


def remove_files(state: State, node: NodeSpec) -> None:
    """Remove the node's folder, including its image store."""
    shutil.rmtree(state.node_folder(node), ignore_errors=True)
