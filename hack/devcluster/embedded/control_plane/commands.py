"""etcd, API server, controllers and scheduler of the embedded cluster: their certificates and command lines."""

from __future__ import annotations

import socket
import sys
from dataclasses import fields
from pathlib import Path

from devcluster.embedded.control_plane.pki import Authority
from devcluster.embedded.state import Ports, Ranges, Record, State
from devcluster.errors import ClusterError
from devcluster.kubernetes.provide import store
from devcluster.kubernetes.release import STORE

# The order in which components are stopped: the API server needs etcd for some seconds while it shuts down.
SHUTDOWN_ORDER = (("relay", "scheduler", "controllers", "services", "dnsmasq"), ("apiserver",), ("etcd",))
API_PORT = 6443
_FIRST_PORT, _PORTS_PER_SLOT = 21000, 20


def free_ports(ranges: Ranges) -> Ports:
    """Return free loopback ports for the control plane: 6443 if it is free, then ports of the cluster's slot.

    The slot is the cluster's number on this machine; each slot has its own ports. All of them are below the ports that
    the kernel assigns to outgoing connections. Such a connection could otherwise take a port between this check and
    the start of the server. Raise ClusterError if there are not enough free ports.
    """
    first = _FIRST_PORT + ranges.slot * _PORTS_PER_SLOT
    found = [port for port in (API_PORT, *range(first, first + _PORTS_PER_SLOT)) if _is_free(port)]
    count = len(fields(Ports))
    if len(found) < count:
        raise ClusterError(
            f"ports {first} to {first + _PORTS_PER_SLOT - 1} of 127.0.0.1: found {len(found)} free; expected at least "
            f"{count}. End the programs that use these ports (ss -ltnp)"
        )
    return Ports(*found[:count])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; bind fails if one listens
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def certify(state: State, record: Record) -> None:
    """Create the certificate authority, all certificates, and the kubeconfigs of the components and of the user."""
    authority = Authority(state.pki)
    authority.create()
    service = "kubernetes.default.svc.cluster.local"
    names = [".".join(service.split(".")[:count]) for count in (1, 2, 3, 5)]
    addresses = [f"IP:{record.ranges.control_plane}", "IP:127.0.0.1", f"IP:{record.ranges.services[1]}"]
    authority.issue(
        "apiserver", "/CN=kube-apiserver", [*addresses, "DNS:localhost", *(f"DNS:{name}" for name in names)]
    )
    authority.issue("apiserver-kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    local = f"https://127.0.0.1:{record.ports.api}"
    inside = f"https://{record.ranges.control_plane}:{API_PORT}"
    for name, subject, server in (
        ("admin", "/O=system:masters/CN=admin", local),
        ("controllers", "/CN=system:kube-controller-manager", inside),
        ("scheduler", "/CN=system:kube-scheduler", inside),
        ("proxy", "/CN=system:kube-proxy", inside),
        ("services", "/CN=dljob:services", inside),
    ):
        authority.issue(name, subject)
        authority.write_kubeconfig(state.pki / f"{name}.kubeconfig", name, server)
    for number, node in enumerate(record.spec.nodes, start=1):
        subject = f"/O=system:nodes/CN=system:node:{node.name}"
        authority.issue(f"node-{node.name}", subject, [f"DNS:{node.name}", f"IP:{record.ranges.node(number)}"])
        authority.write_kubeconfig(state.pki / f"node-{node.name}.kubeconfig", f"node-{node.name}", inside)
    authority.write_kubeconfig(state.kubeconfig, "admin", local, context=f"dljob-{state.name}")


def gates(record: Record) -> list[str]:
    """Return a list with the command-line flag for the cluster's feature gates; an empty list without feature gates.

    All components of Kubernetes get the same flag, because each of them accepts all gates.
    """
    return [f"--feature-gates={record.spec.feature_gates}"] if record.spec.feature_gates else []


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command line that runs a Python module with the current interpreter.

    `name`: name of the module in the package devcluster.embedded, such as services.main. `arguments`: sys.argv[1:].
    """
    hack = Path(__file__).resolve().parents[3]
    start = f"import sys, runpy; sys.path.insert(0, {str(hack)!r}); sys.argv[1:] = {list(arguments)!r}; "
    return [sys.executable, "-c", start + f"runpy.run_module('devcluster.embedded.{name}', run_name='__main__')"]


def commands(state: State, record: Record) -> dict[str, list[str]]:
    """Return name → command line of the components, in the order in which they are started.

    A component does not wait for the one before it: it retries until the other answers.
    """
    binaries, pki, ports, ranges = Path(record.binaries), state.pki, record.ports, record.ranges
    etcd, peer = f"http://127.0.0.1:{ports.etcd}", f"http://127.0.0.1:{ports.etcd_peer}"
    return {
        "relay": python_module("control_plane.relay", "127.0.0.1", str(ports.api), ranges.control_plane, str(API_PORT)),
        "etcd": [
            str(store(binaries) or STORE),
            f"--data-dir={state.folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",  # a crash of the machine may cost the data; `up` then starts anew
        ],
        "apiserver": [
            str(binaries / "kube-apiserver"),
            f"--etcd-servers={etcd}",
            f"--advertise-address={ranges.control_plane}",
            f"--bind-address={ranges.control_plane}",  # reachable from this machine and the nodes only
            f"--secure-port={API_PORT}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
            f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            "--anonymous-auth=true",
            "--enable-admission-plugins=NodeRestriction",
            "--enable-aggregator-routing=true",  # this machine has no kube-proxy: use pod addresses for webhooks
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-cluster-ip-range={ranges.services}",
            "--event-ttl=24h",
            "--profiling=false",
            # Pods of a lost node are evicted after this time instead of five minutes.
            "--default-not-ready-toleration-seconds=15",
            "--default-unreachable-toleration-seconds=15",
            *([f"--runtime-config={record.spec.runtime_config}"] if record.spec.runtime_config else []),
            *gates(record),
        ],
        "controllers": [
            str(binaries / "kube-controller-manager"),
            f"--kubeconfig={pki / 'controllers.kubeconfig'}",
            "--leader-elect=false",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={pki / 'sa.key'}",
            f"--root-ca-file={pki / 'ca.crt'}",
            f"--cluster-signing-cert-file={pki / 'ca.crt'}",
            f"--cluster-signing-key-file={pki / 'ca.key'}",
            "--node-monitor-grace-period=20s",
            "--node-monitor-period=2s",
            "--kube-api-qps=100",
            "--kube-api-burst=200",
            "--bind-address=127.0.0.1",
            f"--secure-port={ports.controllers}",
            *gates(record),
        ],
        "scheduler": [
            str(binaries / "kube-scheduler"),
            f"--kubeconfig={pki / 'scheduler.kubeconfig'}",
            "--leader-elect=false",
            "--kube-api-qps=100",
            "--kube-api-burst=200",
            "--bind-address=127.0.0.1",
            f"--secure-port={ports.scheduler}",
            *gates(record),
        ],
    }
