"""The provider of clusters that runs nodes as Docker containers with kind."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from devcluster.errors import ClusterError
from devcluster.images.oci_layout import Layout
from devcluster.kind import tool as kindtool
from devcluster.locks import locked
from devcluster.model import GPU_RESOURCE, SLOW, ClusterSpec, NodeSpec
from devcluster.paths import cluster_dir
from devcluster.progress import Progress
from devcluster.shell import find, have, run

STORAGE_CLASS = "dljob-shared"
VOLUMES = 24  # static volumes, enough for a test suite; `up` recreates those whose claim was deleted
_VOLUMES_IN_NODE = "/var/lib/dljob-volumes"
_CREATE_LIMIT_S = 900
_ADMIN = "--kubeconfig=/etc/kubernetes/admin.conf"


class Kind:
    """The provider for kind. The protocol `provider.Provider` describes each method.

    kind names the nodes CLUSTER-worker, CLUSTER-worker2, …
    """

    name = "kind"

    def __init__(self, cluster: str, progress: Progress) -> None:
        self._cluster = f"dljob-{cluster}"
        self._lock = f"cluster-{cluster}"
        self._folder = cluster_dir(cluster)
        self._record = self._folder / "kind.json"
        self._config = self._folder / "kubeconfig"
        self._progress = progress

    def up(self, spec: ClusterSpec, recreate: bool) -> None:
        if not have("docker"):
            raise ClusterError(
                "docker: found none on PATH; expected it, because --provider kind needs it. Install Docker, or use "
                "--provider embedded as root on Debian"
            )
        if spec.kubernetes.startswith("/"):
            raise ClusterError(
                f"--kubernetes: found the folder {spec.kubernetes} with --provider kind; expected this option only "
                "with --provider embedded. Choose a version with --kubernetes-version instead"
            )
        kindtool.install(self._progress)
        with locked(self._lock):
            present = self._present()
            if present and not recreate and self._recorded() != spec:
                raise ClusterError(
                    f"cluster {self._cluster!r} runs with other nodes or options than requested: add --recreate "
                    "to replace it"
                )
            if present and not recreate:
                self._stock_volumes()
                self._progress.say(f"cluster {self._cluster!r} is up: {len(spec.nodes)} nodes")
                return
            if present:
                self._delete()
            try:
                self._create(spec)
            except BaseException:
                self._progress.say("deleting the parts of the cluster that were started")
                self._delete()
                raise

    def down(self) -> None:
        with locked(self._lock):
            if not self._present() and not self._folder.exists():
                self._progress.say(f"cluster {self._cluster!r} does not exist")
                return
            with self._progress.step(f"deleting cluster {self._cluster!r}"):
                self._delete()

    def status(self) -> dict[str, object]:
        spec = self._recorded()
        running = spec is not None and self._present()
        facts: dict[str, object] = {"provider": self.name, "name": self._cluster, "running": running}
        if spec and running:
            nodes = [
                {"name": self._container(spec, node), "labels": node.labels, "cpus": node.cpus} for node in spec.nodes
            ]
            facts |= {"kubeconfig": str(self._config), "nodes": nodes, "storage_class": STORAGE_CLASS}
        return facts

    def kubeconfig(self) -> Path:
        if not self._config.exists() or not self._present():
            raise ClusterError(f"cluster {self._cluster!r} is not running: run hack/cluster up")
        return self._config

    def kubectl(self) -> Path:
        found = find("kubectl")
        if not found:
            raise ClusterError("kubectl: found no such program on PATH; expected one. Install kubectl")
        return Path(found)

    def load(self, archives: Sequence[Path]) -> None:
        self.kubeconfig()
        with tempfile.TemporaryDirectory(prefix="dljob-load-") as scratch:
            for archive in archives:
                file = archive
                if archive.is_dir():
                    file = Path(scratch, "images.tar")
                    layout = Layout(archive)
                    with file.open("wb") as output:
                        layout.stream(layout.images(), (), output)
                with self._progress.step(f"loading {archive.name}"):
                    run([_kind(), "load", "image-archive", file, "--name", self._cluster], timeout_s=_CREATE_LIMIT_S)

    def node(self, action: str, name: str) -> None:
        spec = self._recorded()
        known = {self._container(spec, node): node for node in spec.nodes} if spec else {}
        aliases = {node.name: container for container, node in known.items()}
        container = aliases.get(name, name)
        if container not in known:
            raise ClusterError(
                f"node {name!r}: found no such node in cluster {self._cluster!r}; expected one of {sorted(known)}. "
                "Correct the name"
            )
        if action == "stop":
            run(["docker", "kill", container])
        elif action == "start":
            run(["docker", "start", container])
        elif action == "cut":
            address = run(["docker", "inspect", "--format", _ADDRESS, container]).stdout.strip()
            (self._folder / f"address-{container}").write_text(address)
            run(["docker", "network", "disconnect", "kind", container])
        elif action == "slow":
            run(
                [
                    "docker",
                    "update",
                    "--cpus",
                    f"{SLOW * (known[container].cpus or os.cpu_count() or 1):.2f}",
                    container,
                ]
            )
        else:
            cut = self._folder / f"address-{container}"
            if cut.exists():
                run(["docker", "network", "connect", "--ip", cut.read_text(), "kind", container])
                cut.unlink()
            run(["docker", "update", "--cpus", f"{known[container].cpus or os.cpu_count() or 1}", container])
        self._progress.say(f"node {container}: {action} done")

    # ----------------------------------------------------------------------------------------------------------

    def _create(self, spec: ClusterSpec) -> None:
        volumes = self._folder / "volumes"
        volumes.mkdir(parents=True, exist_ok=True)
        config = self._folder / "kind-config.json"
        config.write_text(json.dumps(cluster_config(spec, volumes), indent=1))
        self._record.write_text(json.dumps(spec.to_json()))
        with self._progress.step(f"kind creates {len(spec.nodes)} nodes and a control plane"):
            run(
                [
                    *(_kind(), "create", "cluster", "--name", self._cluster, "--config", str(config)),
                    *("--kubeconfig", str(self._config), "--wait", "180s"),
                ],
                timeout_s=_CREATE_LIMIT_S,
                log=self._folder / "create.log",
            )
        for node in spec.nodes:
            self._shape(self._container(spec, node), node)
        self._kubectl("annotate", "storageclass", "standard", "storageclass.kubernetes.io/is-default-class-")
        self._stock_volumes()
        self._progress.say(f"cluster {self._cluster!r} is up; export KUBECONFIG={self._config}")

    def _shape(self, container: str, node: NodeSpec) -> None:
        """Set the quotas of a node's container, and add simulated GPUs to the node."""
        if node.cpus is not None:
            run(["docker", "update", "--cpus", str(node.cpus), container])
        if node.memory_nbytes is not None:
            size = str(node.memory_nbytes)
            run(["docker", "update", "--memory", size, "--memory-swap", size, container])
        if node.gpus:
            key = GPU_RESOURCE.replace("/", "~1")
            patch = [
                {"op": "add", "path": f"/status/{part}/{key}", "value": str(node.gpus)}
                for part in ("capacity", "allocatable")
            ]
            self._kubectl(
                "patch", "node", container, "--subresource=status", "--type=json", f"--patch={json.dumps(patch)}"
            )

    def _stock_volumes(self) -> None:
        """Create the StorageClass and its static volumes. Empty and recreate volumes whose claim was deleted."""
        listed = json.loads(self._kubectl("get", "persistentvolumes", "--output=json") or '{"items": []}')
        released = [
            one["metadata"]["name"]
            for one in listed["items"]
            if one["spec"].get("storageClassName") == STORAGE_CLASS and one["status"]["phase"] in ("Released", "Failed")
        ]
        if released:
            self._kubectl("delete", "persistentvolume", *released)
        folders = [f"{_VOLUMES_IN_NODE}/{name}" for name in released]
        made = [f"{_VOLUMES_IN_NODE}/{volume_name(number)}" for number in range(VOLUMES)]
        script = f"rm -rf {' '.join(folders)}; " if folders else ""
        self._in_control_plane("sh", "-c", f"{script}mkdir -p {' '.join(made)} && chmod 0777 {' '.join(made)}")
        self._kubectl("apply", "--filename=-", input_text=json.dumps(storage_objects()))

    def _delete(self) -> None:
        if self._present():
            # Files in the volumes belong to the users of pods, so only a container may remove them.
            self._in_control_plane("sh", "-c", f"rm -rf {_VOLUMES_IN_NODE}/*", check=False)
            run([_kind(), "delete", "cluster", "--name", self._cluster, "--kubeconfig", self._config], timeout_s=300)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _present(self) -> bool:
        listed = run([_kind(), "get", "clusters"], check=False)
        return listed.returncode == 0 and self._cluster in listed.stdout.split()

    def _recorded(self) -> ClusterSpec | None:
        try:
            return ClusterSpec.from_json(json.loads(self._record.read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def _container(self, spec: ClusterSpec | None, node: NodeSpec) -> str:
        assert spec
        number = spec.nodes.index(node) + 1
        return f"{self._cluster}-worker{number if number > 1 else ''}"

    def _kubectl(self, *words: str, input_text: str | None = None) -> str:
        return self._in_control_plane("kubectl", _ADMIN, *words, input_text=input_text)

    def _in_control_plane(self, *words: str, input_text: str | None = None, check: bool = True) -> str:
        """Run a command in the control plane's container, which contains kubectl of the cluster's version."""
        flags = ["--interactive"] if input_text is not None else []
        command = ["docker", "exec", *flags, f"{self._cluster}-control-plane", *words]
        return run(command, input_text=input_text, check=check, timeout_s=120).stdout


def _kind() -> str:
    """Return the path of kind. If it is missing, return the name `kind`, so that the call fails with a clear error."""
    return "kind" if have("kind") else (kindtool.program() or "kind")


_ADDRESS = '{{(index .NetworkSettings.Networks "kind").IPAddress}}'


def cluster_config(spec: ClusterSpec, volumes: Path) -> dict[str, Any]:
    """Return the configuration of kind: a control plane and one worker per node, which share the folder `volumes`."""
    mounts = [{"hostPath": str(volumes), "containerPath": _VOLUMES_IN_NODE}]
    image = {"image": f"kindest/node:v{spec.kubernetes}"} if spec.kubernetes else {}
    workers = [{"role": "worker", "labels": node.labels, "extraMounts": mounts, **image} for node in spec.nodes]
    config: dict[str, Any] = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": "control-plane", "extraMounts": mounts, **image}, *workers],
    }
    if spec.feature_gates:
        config["featureGates"] = {name: on == "true" for name, on in _switches(spec.feature_gates)}
    if spec.runtime_config:
        config["runtimeConfig"] = dict(_switches(spec.runtime_config))
    return config


def _switches(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        name, _, value = part.partition("=")
        yield name, value


def volume_name(number: int) -> str:
    """Return the name of a static volume, which is also the name of its folder."""
    return f"{STORAGE_CLASS}-{number:02d}"


def storage_objects() -> dict[str, Any]:
    """Return the default StorageClass and its hostPath volumes, which all nodes share."""
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
        "reclaimPolicy": "Retain",
        "volumeBindingMode": "Immediate",
    }
    volumes = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume_name(number)},
            "spec": {
                "storageClassName": STORAGE_CLASS,
                "capacity": {"storage": "100Gi"},
                "accessModes": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": f"{_VOLUMES_IN_NODE}/{volume_name(number)}", "type": "Directory"},
            },
        }
        for number in range(VOLUMES)
    ]
    return {"apiVersion": "v1", "kind": "List", "items": [storage_class, *volumes]}
