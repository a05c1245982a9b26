"""What is known of one running cluster: its folder, and the record that `up` writes and everyone else reads."""

from __future__ import annotations

import hashlib
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from devcluster.embedded.processes import Registry, boot_id
from devcluster.model import ClusterSpec, NodeSpec

SLOTS = 32


@dataclass(frozen=True)
class Ranges:
    """Addresses of a cluster. A slot is a set of ranges of its own, so that several clusters can coexist."""

    slot: int

    @property
    def nodes(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"10.10.{self.slot}.0/24")

    @property
    def pods(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"10.{244 - self.slot}.0.0/16")

    @property
    def services(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"10.{96 + self.slot}.0.0/16")

    @property
    def all(self) -> tuple[ipaddress.IPv4Network, ...]:
        return (self.nodes, self.pods, self.services)

    @property
    def control_plane(self) -> str:
        """Where the API server listens for the nodes and pods."""
        return str(self.nodes[1])

    @property
    def dns(self) -> str:
        return str(self.nodes[2])

    def node(self, number: int) -> str:
        """Address of node `number`, counted from 1."""
        return str(self.nodes[10 + number])

    def node_pods(self, number: int) -> str:
        """Range of the pods on node `number`."""
        return f"10.{244 - self.slot}.{number}.0/24"


@dataclass(frozen=True)
class Ports:
    """Loopback ports of the control plane, free when the cluster was made."""

    api: int
    etcd: int
    etcd_peer: int
    controllers: int
    scheduler: int


@dataclass(frozen=True)
class Record:
    """Everything that `up` decided; written before the first side effect, so that `down` always knows."""

    spec: ClusterSpec
    ranges: Ranges
    ports: Ports
    binaries: str
    release: str
    boot: str
    complete: bool = False


class State:
    """The folder of one cluster."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.pki = folder / "pki"
        self.logs = folder / "log"
        self.volumes = folder / "volumes"
        self.kubeconfig = folder / "kubeconfig"
        self.processes = Registry(folder / "processes", str(folder))

    @property
    def prefix(self) -> str:
        """Name of the cluster's switch namespace and cgroup; the nodes' names extend it.

        It depends on the folder too: clusters of one name in two caches are two clusters.
        """
        return f"dljob-{self.name}-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:4]}"

    def node_folder(self, node: NodeSpec) -> Path:
        return self.folder / "nodes" / node.name

    def netns(self, node: NodeSpec) -> str:
        return f"{self.prefix}.{node.name}"  # a dot is in no cluster's name

    def cgroup(self, node: NodeSpec) -> str:
        return f"{self.prefix}/{node.name}"

    def read(self) -> Record | None:
        """The record, or None where there is no cluster."""
        try:
            data = json.loads((self.folder / "cluster.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        data.setdefault("release", "unknown")  # recorded since 0.2.0
        return Record(
            spec=ClusterSpec.from_json(data["spec"]),
            ranges=Ranges(data["slot"]),
            ports=Ports(**data["ports"]),
            binaries=data["binaries"],
            release=data["release"],
            boot=data["boot"],
            complete=data["complete"],
        )

    def write(self, record: Record) -> None:
        """Replaces the record in one step."""
        data = {
            "spec": record.spec.to_json(),
            "slot": record.ranges.slot,
            "ports": vars(record.ports),
            "binaries": record.binaries,
            "release": record.release,
            "boot": record.boot,
            "complete": record.complete,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        scratch = self.folder / "cluster.json.new"
        scratch.write_text(json.dumps(data, indent=1))
        scratch.replace(self.folder / "cluster.json")


def this_boot(record: Record) -> bool:
    """Whether the record is of this boot; after a reboot only files are left of a cluster."""
    return record.boot == boot_id()
