"""Run a control plane of Kubernetes without nodes, as local processes: etcd, API server, controllers, scheduler, KWOK.

KWOK (``hack/kwok``) simulates nodes and the pods on them: it keeps nodes Ready and reports that pods run. The programs
of Kubernetes are those of ``hack/cluster``. Nothing of it needs root, except the packages of Debian: openssl, and
etcd if Kubernetes came without one.
"""

import hashlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from devcluster.embedded.control_plane.pki import Authority
from devcluster.embedded.packages import RUNTIME, STORE, install
from devcluster.kubernetes.provide import Kubernetes, provide, store
from devcluster.locks import locked
from devcluster.paths import REPOSITORY, cache_root
from devcluster.progress import Progress
from devcluster.shell import find, run

READY_S = 120.0
END_S = 10.0
KWOK = "sigs.k8s.io/kwok"
STAGES = (
    "node/fast/node-initialize.yaml", "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml", "pod/fast/pod-delete.yaml",
)  # fmt: skip
KWOK_MODULE = REPOSITORY / "hack" / "kwok"
_BUILD_S = 1800.0


@dataclass
class ControlPlane:
    """A running control plane."""

    kubeconfig: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def cpu_s(self, name: str) -> float:
        """Return the processor time of a process (apiserver, etcd, controllers, scheduler or kwok)."""
        return cpu_s(self.processes[name].pid)

    def check(self) -> None:
        """Raise SystemExit if one of the processes has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise SystemExit(f"{name}: found that it ended with {process.returncode}; expected it to run")


def cpu_s(pid: int) -> float:
    """Return the processor time in seconds that a process has used, or 0 if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB, or 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def children(pid: int) -> list[int]:
    """Return the ids of the direct children of a process."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for each in lists for word in each.read_text().split()]


def kwok(progress: Progress) -> Path:
    """Return a folder with the program KWOK and its stages, built from its Go modules once and kept in the cache.

    ``hack/kwok/go.sum`` pins the digests of all modules. Stages say how KWOK changes nodes and pods.
    """
    sources = [(KWOK_MODULE / name).read_bytes() for name in ("go.mod", "go.sum")]
    target = cache_root() / "kwok" / hashlib.sha256(b"".join(sources)).hexdigest()[:16]
    with locked("kwok"):
        if target.exists():
            return target
        if not find("go"):
            raise SystemExit("Go: found none on PATH; expected Go 1.26 or newer to build KWOK. Install it")
        scratch = target.with_suffix(".new")
        shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed
        scratch.mkdir(parents=True)
        with progress.step("building KWOK, once", expected_s=120):
            flags = ("-trimpath", "-mod=readonly", "-ldflags", "-s -w")
            _go("build", *flags, "-o", str(scratch / "kwok"), f"{KWOK}/cmd/kwok")
        module = Path(_go("list", "-mod=readonly", "-m", "-f", "{{.Dir}}", KWOK).strip())
        for name in STAGES:
            shutil.copy(module / "kustomize" / "stage" / name, scratch)
        scratch.rename(target)
    return target


def _go(*words: str) -> str:
    env = {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "PWD": str(KWOK_MODULE)}
    return run(["go", *words], cwd=KWOK_MODULE, env=env, timeout_s=_BUILD_S, nice=True).stdout


@contextmanager
def control_plane(progress: Progress) -> Iterator[ControlPlane]:
    """Start a control plane, yield it when it is ready, and end it. Its state is in a temporary folder."""
    binaries, _ = provide(Kubernetes(), progress)
    install({"openssl": RUNTIME["openssl"], **({} if store(binaries) else STORE)}, progress)
    simulator = kwok(progress)
    folder = Path(tempfile.mkdtemp(prefix="dljob-scale-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an ended benchmark leaves no processes
    found = ControlPlane(folder / "kubeconfig")
    try:
        with progress.step("control plane ready"):
            server = _certify(folder, found.kubeconfig)
            for name, command in _commands(folder, binaries, simulator, server).items():
                with (folder / f"{name}.log").open("wb") as log:
                    found.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
                if name == "apiserver":
                    _wait_ready(found, server, folder)
        yield found
    except BaseException:
        kept = cache_root() / "logs" / "scale"
        kept.mkdir(parents=True, exist_ok=True)
        for log_path in folder.glob("*.log"):
            shutil.copy(log_path, kept)
        progress.say(f"logs: {kept}")
        raise
    finally:
        _end(list(found.processes.values()))
        shutil.rmtree(folder, ignore_errors=True)


def _certify(folder: Path, kubeconfig: Path) -> str:
    """Create certificates and kubeconfigs. Return the address of the API server."""
    authority, server = Authority(folder / "pki"), f"https://127.0.0.1:{_free_port()}"
    authority.create()
    authority.issue("apiserver", "/CN=kube-apiserver", ["IP:127.0.0.1", "DNS:localhost"])
    for name, subject in (
        ("admin", "/O=system:masters/CN=admin"),
        ("controllers", "/CN=system:kube-controller-manager"),
        ("scheduler", "/CN=system:kube-scheduler"),
    ):
        authority.issue(name, subject)
        authority.write_kubeconfig(kubeconfig if name == "admin" else folder / f"{name}.kubeconfig", name, server)
    return server


def _commands(folder: Path, binaries: Path, simulator: Path, server: str) -> dict[str, Sequence[str]]:
    pki, etcd = folder / "pki", f"http://127.0.0.1:{_free_port()}"
    peer = f"http://127.0.0.1:{_free_port()}"
    # With the etcd of Debian 12, an API server that offers WatchList refuses watches from version 0, as KWOK opens
    # them. KWOK then lists again with back-off, and notices pods up to a minute late.
    gates = () if store(binaries) else ("--feature-gates=WatchList=false",)
    # The controllers' own limits of 20 and 50 requests per second would be what is measured.
    unlimited = ("--kube-api-qps=2000", "--kube-api-burst=4000", "--leader-elect=false", "--bind-address=127.0.0.1")
    return {
        "etcd": (
            str(store(binaries) or find("etcd") or "etcd"), f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}", "--unsafe-no-fsync",
            "--quota-backend-bytes=8589934592",
        ),
        "apiserver": (
            str(binaries / "kube-apiserver"), f"--etcd-servers={etcd}", "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1", f"--secure-port={server.rpartition(':')[2]}",
            f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--client-ca-file={pki / 'ca.crt'}", "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-signing-key-file={pki / 'sa.key'}", f"--service-account-key-file={pki / 'sa.pub'}",
            "--service-cluster-ip-range=10.96.0.0/12", "--endpoint-reconciler-type=none", "--profiling=false",
            *gates,
        ),
        "controllers": (
            str(binaries / "kube-controller-manager"), f"--kubeconfig={folder / 'controllers.kubeconfig'}",
            f"--service-account-private-key-file={pki / 'sa.key'}", f"--root-ca-file={pki / 'ca.crt'}",
            "--use-service-account-credentials", f"--secure-port={_free_port()}",
            "--concurrent-statefulset-syncs=20", "--node-monitor-grace-period=600s", *unlimited,
        ),
        "scheduler": (
            str(binaries / "kube-scheduler"), f"--kubeconfig={folder / 'scheduler.kubeconfig'}",
            f"--secure-port={_free_port()}", *unlimited,
        ),
        "kwok": (
            str(simulator / "kwok"), f"--kubeconfig={folder / 'kubeconfig'}", "--manage-all-nodes=true",
            "--node-lease-duration-seconds=200", f"--server-address=127.0.0.1:{_free_port()}",
            *(f"--config={simulator / Path(name).name}" for name in STAGES),
        ),
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(found: ControlPlane, server: str, folder: Path) -> None:
    context = ssl.create_default_context(cafile=str(folder / "pki" / "ca.crt"))
    end_s = time.monotonic() + READY_S
    while True:
        found.check()
        try:
            with urllib.request.urlopen(f"{server}/readyz", timeout=5, context=context) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > end_s:
                raise SystemExit(f"API server: found it not ready after {READY_S:.0f} s; expected it to be") from None
        time.sleep(0.2)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
