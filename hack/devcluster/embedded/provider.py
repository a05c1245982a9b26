"""The embedded provider of clusters, which `hack/cluster` uses on a Debian machine without Docker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from devcluster.embedded import network, packages
from devcluster.embedded.control_plane import commands as controlplane
from devcluster.embedded.nodes import cgroups, nodes
from devcluster.embedded.nodes import image_seed as seed
from devcluster.embedded.processes import boot_id, end, wait_until
from devcluster.embedded.services import dns, storage
from devcluster.embedded.services import main as services
from devcluster.embedded.services.api import Api, ApiError
from devcluster.embedded.state import Record, State, this_boot
from devcluster.errors import ClusterError
from devcluster.images.oci_layout import Layout
from devcluster.kubernetes.provide import Kubernetes, client, provide, store
from devcluster.kubernetes.release import Release, parse_release
from devcluster.locks import locked
from devcluster.model import ClusterSpec, NodeSpec
from devcluster.paths import cache_root, cluster_dir
from devcluster.progress import Progress
from devcluster.shell import find, run

_READY_LIMIT_S = 180


def unsuited() -> str | None:
    """Return the reason why this machine cannot run the embedded cluster, or None if it can."""
    if os.geteuid() != 0:
        return "the embedded cluster needs root (namespaces, mounts, cgroups)"
    if not shutil.which("apt-get") or not Path("/etc/debian_version").exists():
        return "the embedded cluster needs Debian or Ubuntu (it is made of their packages)"
    return None


class Embedded:
    """The embedded provider. The protocol `provider.Provider` describes each method."""

    name = "embedded"

    def __init__(self, cluster: str, progress: Progress) -> None:
        self._state = State(cluster_dir(cluster), cluster)
        self._cluster = cluster
        self._progress = progress

    def up(self, spec: ClusterSpec, recreate: bool) -> None:
        with locked(f"cluster-{self._cluster}"):
            record = self._state.read()
            if record and record.complete and self._running(record) and not recreate:
                if record.spec != spec:
                    raise ClusterError(
                        f"cluster {self._cluster!r} runs with other options:\n  {_describe(record.spec)}\n"
                        f"asked for:\n  {_describe(spec)}\nadd --recreate to replace it, or choose another --name"
                    )
                self._start_missing(record)
                self._wait_for_api(record)
                self._wait_ready(record, spec.nodes)
                self._progress.say(f"cluster {self._cluster!r} is up: {len(spec.nodes)} nodes")
                return
            packages.install(packages.RUNTIME, self._progress)
            binaries, release = provide(kubernetes_of(spec), self._progress)
            if store(binaries) is None:
                packages.install(packages.STORE, self._progress)
            seed.prepare(self._progress)
            if record or self._remains():
                with self._progress.step("removing the remains of an earlier cluster"):
                    self._remove()
            try:
                self._create(spec, binaries, release)
            except BaseException as failure:
                self._progress.say("deleting the parts of the cluster that were started")
                if not isinstance(failure, KeyboardInterrupt):
                    self._keep_logs()
                self._remove()
                raise

    def down(self) -> None:
        with locked(f"cluster-{self._cluster}"):
            if not self._state.folder.exists() and not self._remains():
                self._progress.say(f"cluster {self._cluster!r} does not exist")
                return
            with self._progress.step(f"deleting cluster {self._cluster!r}"):
                self._remove()

    def status(self) -> dict[str, object]:
        record = self._state.read()
        running = bool(record and record.complete and self._running(record))
        facts: dict[str, object] = {"provider": self.name, "name": self._cluster, "running": running}
        if not record or not running:
            return facts
        return {
            **facts,
            "kubeconfig": str(self._state.kubeconfig),
            "kubernetes": record.release,
            "kubectl": str(client(Path(record.binaries)) or ""),
            "ready": self._api(record).ready(),
            "nodes": [self._node_status(record, node) for node in record.spec.nodes],
            "storage_class": storage.CLASS,
            "logs": str(self._state.logs),
        }

    def kubeconfig(self) -> Path:
        record = self._state.read()
        if not record or not record.complete or not self._running(record):
            raise ClusterError(f"cluster {self._cluster!r} is not running: run hack/cluster up")
        return self._state.kubeconfig

    def kubectl(self) -> Path:
        self.kubeconfig()
        record = self._state.read()
        assert record
        found = client(Path(record.binaries)) or find("kubectl")
        if not found:
            raise ClusterError(
                f"kubectl: found no such program in {record.binaries} nor on PATH; expected one. Install kubectl"
            )
        return Path(found)

    def load(self, archives: Sequence[Path]) -> None:
        record = self._state.read()
        if not record or not self._running(record):
            raise ClusterError(f"cluster {self._cluster!r} is not running: run hack/cluster up")

        def load_one(node: NodeSpec) -> None:
            address = nodes.containerd_address(self._state, node)
            for archive in archives:
                if archive.is_dir():
                    layout = Layout(archive)
                    seed.load_layout(address, self._state.node_folder(node) / "containerd", layout, layout.images())
                else:
                    seed.import_archive(address, archive.resolve())

        names = ", ".join(archive.name for archive in archives)
        with self._progress.step(f"loading {names} into {len(record.spec.nodes)} nodes"), locked("images"):
            _all(load_one, record.spec.nodes)

    def node(self, action: str, name: str) -> None:
        record = self._state.read()
        if not record or not self._running(record):
            raise ClusterError(f"cluster {self._cluster!r} is not running: run hack/cluster up")
        found = [node for node in record.spec.nodes if node.name == name]
        if not found:
            raise ClusterError(
                f"node {name!r}: found no such node in cluster {self._cluster!r}; expected one of "
                f"{[node.name for node in record.spec.nodes]}. Correct the name"
            )
        if action == "stop":
            nodes.stop(self._state, found[0])
        elif action == "start":
            if not nodes.init_process(self._state, found[0]):
                nodes.start(self._state, record, found[0])
            self._wait_ready(record, found)
        elif action == "slow":
            nodes.set_slow(self._state, found[0], slow=True)
        else:
            network.set_cut(self._state, found[0], action == "cut")
            if action == "heal":
                nodes.set_slow(self._state, found[0], slow=False)
        self._progress.say(f"node {name}: {action} done")

    # -- bringing up -------------------------------------------------------------------------------------------

    def _create(self, spec: ClusterSpec, binaries: Path, release: Release) -> None:
        state = self._state
        with locked("dljob-network", folder=Path("/run/lock")):
            ranges = network.pick_ranges()
            ports = controlplane.free_ports(ranges)
            record = Record(spec, ranges, ports, str(binaries), str(release), boot_id())
            state.write(record)
            with self._progress.step("network"):
                network.create(state, record.ranges)
                for node in spec.nodes:
                    network.create_node(state, record.ranges, spec, node)
        state.volumes.mkdir(exist_ok=True)
        with self._progress.step("certificates and control plane"):
            controlplane.certify(state, record)
            self._start_control_plane(record)
        with self._progress.step(f"{len(spec.nodes)} nodes started"):
            _all(lambda node: nodes.start(state, record, node), spec.nodes)
        with self._progress.step("API server ready"):
            self._wait_for_api(record)
        api = self._api(record)
        rbac, classes = "/apis/rbac.authorization.k8s.io/v1", "/apis/storage.k8s.io/v1/storageclasses"
        for part in (services, nodes):
            api.ensure(f"{rbac}/clusterroles", part.ROLE)
            api.ensure(f"{rbac}/clusterrolebindings", part.BINDING)
        api.ensure(classes, storage.STORAGE_CLASS)
        self._start_services()
        with self._progress.step("nodes Ready"):
            self._wait_ready(record, spec.nodes)
        # The controllers give up after 10 s without an API server, which may need longer on a busy machine.
        self._start_control_plane(record)
        state.write(replace(record, complete=True))
        self._progress.say(f"cluster {self._cluster!r} is up; export KUBECONFIG={state.kubeconfig}")

    def _start_control_plane(self, record: Record) -> None:
        commands = controlplane.commands(self._state, record)
        commands[dns.PROCESS] = dns.command(self._state, record.ranges.dns)
        for name, command in commands.items():
            if not self._state.processes.get(name):
                self._state.processes.start(name, command, self._state.logs / f"{name}.log")

    def _start_services(self) -> None:
        command = controlplane.python_module("services.main", str(self._state.folder), self._state.name)
        self._state.processes.start("services", command, self._state.logs / "services.log")

    def _start_missing(self, record: Record) -> None:
        """Restart components and nodes that have ended in a cluster whose API server still runs."""
        self._start_control_plane(record)
        if not self._state.processes.get("services"):
            self._start_services()
        for node in record.spec.nodes:
            if not nodes.init_process(self._state, node):
                self._progress.say(f"node {node.name} was down: starting it")
                nodes.start(self._state, record, node)

    def _wait_for_api(self, record: Record) -> None:
        def ready_or_dead() -> bool:
            for part in ("etcd", "apiserver"):
                if not self._state.processes.get(part):
                    raise ClusterError(f"{part} ended: {self._log_tail(part)}")
            return self._api(record).ready()

        if not wait_until(ready_or_dead, _READY_LIMIT_S, poll_s=0.05):
            raise ClusterError(f"the API server is not ready after {_READY_LIMIT_S} s: {self._log_tail('apiserver')}")

    def _wait_ready(self, record: Record, wanted: Sequence[NodeSpec]) -> None:
        api, waiting = self._api(record), {node.name: node for node in wanted}

        def all_ready() -> bool:
            for name, node in list(waiting.items()):
                if not self._state.processes.get(nodes.process_name(node)):
                    raise ClusterError(
                        f"node {name}: found that its first process has ended; expected it to run. The end of its "
                        f"log: {self._log_tail(f'{name}-init')}"
                    )
                if _is_ready(api, node):
                    del waiting[name]
            return not waiting

        if not wait_until(all_ready, _READY_LIMIT_S, poll_s=0.05):
            name = min(waiting)
            raise ClusterError(
                f"node {name} is not Ready after {_READY_LIMIT_S} s: {self._log_tail(f'{name}-kubelet')}"
            )

    # -- taking down ------------------------------------------------------------------------------------------

    def _remove(self) -> None:
        """Remove all parts of the cluster that exist.

        The last parts are its `unreachable` routes, because they prevent its packets from leaving this machine.
        """
        state, record = self._state, self._state.read()
        if record and this_boot(record):
            _all(lambda node: nodes.stop(state, node), record.spec.nodes)
            for group in controlplane.SHUTDOWN_ORDER:
                state.processes.end(group, grace_s=0)
        end(list(state.processes.strays()), grace_s=0)
        cgroups.remove(cgroups.detect(), state.prefix)
        with locked("dljob-network", folder=Path("/run/lock")):
            network.remove(state)
        # A node's image store has 50,000 files. shutil.rmtree takes twice as long.
        run(["rm", "--recursive", "--force", state.folder], check=False, timeout_s=300)
        if state.folder.exists():
            raise ClusterError(
                f"{state.folder} cannot be removed: look at what is mounted there (findmnt -R {state.folder})"
            )

    def _remains(self) -> bool:
        """Return True if cgroups, networks or processes of a cluster with this name exist, even without its Record."""
        groups = cgroups.detect().trees(self._state.prefix)
        return bool(groups) or Path("/run/netns", self._state.prefix).exists() or any(self._state.processes.strays())

    def _keep_logs(self) -> None:
        if self._state.logs.exists():
            kept = cache_root() / "logs" / self._cluster
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self._state.logs, kept)
            self._progress.say(f"logs: {kept}")

    # -- status ------------------------------------------------------------------------------------------------

    def _api(self, record: Record) -> Api:
        return Api(record.ranges.control_plane, controlplane.API_PORT, self._state.pki, "admin")

    def _running(self, record: Record) -> bool:
        return this_boot(record) and self._state.processes.get("apiserver") is not None

    def _node_status(self, record: Record, node: NodeSpec) -> dict[str, object]:
        return {
            "name": node.name,
            "ready": _is_ready(self._api(record), node),
            "labels": node.labels,
            "cpus": node.cpus,
            "address": record.ranges.node(record.spec.nodes.index(node) + 1),
        }

    def _log_tail(self, name: str) -> str:
        log = self._state.logs / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines()[-12:] if log.exists() else []
        return "\n".join([str(log), *lines])


def _is_ready(api: Api, node: NodeSpec) -> bool:
    try:
        status = api.request("GET", f"/api/v1/nodes/{node.name}")["status"]
    except (ApiError, OSError):
        return False
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", []))
    shown = int(status.get("allocatable", {}).get("nvidia.com/gpu", 0)) == node.gpus
    return ready and shown


def _all(action: Callable[[NodeSpec], None], wanted: Sequence[NodeSpec]) -> None:
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(action, wanted))


def kubernetes_of(spec: ClusterSpec) -> Kubernetes:
    """Return the Kubernetes that the cluster must run: the programs in a folder, a release, or the default release."""
    if spec.kubernetes.startswith("/"):
        return Kubernetes(folder=Path(spec.kubernetes))
    return Kubernetes(release=parse_release(spec.kubernetes) if spec.kubernetes else None)


def _describe(spec: ClusterSpec) -> str:
    option = "--kubernetes" if spec.kubernetes.startswith("/") else "--kubernetes-version"
    chosen = {option: spec.kubernetes, "--feature-gates": spec.feature_gates, "--runtime-config": spec.runtime_config}
    words = [f"--node {node.option}" for node in spec.nodes]
    return " ".join([*words, *(f"{name} {value}" for name, value in chosen.items() if value)])
