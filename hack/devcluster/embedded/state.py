"""The state of one running cluster: its folder, and the record that `up` writes and other commands read."""

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
    """Address ranges of a cluster. Each cluster on a machine has its own `slot` (a number), which determines them."""

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
        """Return the address at which the API server listens for nodes and pods."""
        return str(self.nodes[1])

    @property
    def dns(self) -> str:
        return str(self.nodes[2])

    def node(self, number: int) -> str:
        """Return the address of node `number`, counted from 1."""
        return str(self.nodes[10 + number])

    def node_pods(self, number: int) -> str:
        """Return the address range of the pods on node `number`."""
        return f"10.{244 - self.slot}.{number}.0/24"


@dataclass(frozen=True)
class Ports:
    """Loopback ports of the control plane. They were free when the cluster was created."""

    api: int
    etcd: int
    etcd_peer: int
    controllers: int
    scheduler: int


@dataclass(frozen=True)
class Record:
    """All decisions of the command `up`: the requested cluster, its addresses, ports and programs.

    `up` writes the record to a file before it changes anything on the machine, so that `down` can undo every change.
    `binaries`: folder with the Kubernetes programs. `boot`: id of the boot in which the cluster was created.
    `complete`: True after `up` has finished.
    """

    spec: ClusterSpec
    ranges: Ranges
    ports: Ports
    binaries: str
    release: str
    boot: str
    complete: bool = False


class State:
    """The folder with the state of one cluster."""

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
        """Return the name of the cluster's switch namespace and cgroup, with which the names of its nodes begin.

        It contains a digest of the folder, so that clusters with equal names in different cache folders do not collide.
        """
        return f"dljob-{self.name}-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:4]}"

    def node_folder(self, node: NodeSpec) -> Path:
        return self.folder / "nodes" / node.name

    def netns(self, node: NodeSpec) -> str:
        return f"{self.prefix}.{node.name}"  # cluster names do not contain dots

    def cgroup(self, node: NodeSpec) -> str:
        return f"{self.prefix}/{node.name}"

    def read(self) -> Record | None:
        """Return the record from its file, or None if the file is missing or is not valid JSON."""
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
        """Replace the record atomically."""
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
    """Return True if the record was written since the last boot. After a reboot, only files of a cluster exist."""
    return record.boot == boot_id()
