"""Runs etcd and the server on free loopback ports, and ends both."""

import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from devcluster.errors import ClusterError
from devcluster.shell import run

READY_S = 60.0
END_S = 10.0
# What would need the rest of Kubernetes: webhooks, policies, namespaces.
_NO_ADMISSION = (
    "NamespaceLifecycle",
    "MutatingAdmissionWebhook",
    "ValidatingAdmissionWebhook",
    "MutatingAdmissionPolicy",
    "ValidatingAdmissionPolicy",
)


@dataclass(frozen=True)
class Address:
    """Where the server is, and the one certificate that serves as authority, server and administrator."""

    url: str
    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.load_cert_chain(self.certificate, self.key)
        return context


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/O=system:masters/CN=crd-current", "-keyout", str(key), "-out", str(certificate)]
    command += ["-addext", "extendedKeyUsage=clientAuth,serverAuth", "-addext", "subjectAltName=IP:127.0.0.1"]
    run(command)
    return certificate, key


def _nowhere(folder: Path) -> Path:
    """A kubeconfig without a cluster: the server wants one for what its administrator never needs."""
    file = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "nowhere", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "nowhere", "context": {"cluster": "nowhere", "user": "nobody"}}],
        "current-context": "nowhere",
    }
    file.write_text(yaml.safe_dump(config))
    return file


@contextmanager
def _process(command: Sequence[str | Path], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    continue


@contextmanager
def serving(binary: Path, folder: Path) -> Iterator[Address]:
    """The server, ready, with its data and logs in ``folder``. Raises ClusterError when it does not come up."""
    client_port, peer_port, port = _free_ports(3)
    certificate, key = _certificate(folder)
    nowhere = _nowhere(folder)
    etcd, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    storage: list[str | Path] = ["etcd", "--data-dir", folder / "etcd"]
    storage += ["--listen-client-urls", etcd, "--advertise-client-urls", etcd]
    storage += [
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"default={peer}",
    ]
    server: list[str | Path] = [
        binary,
        "--etcd-servers",
        etcd,
        "--bind-address",
        "127.0.0.1",
        "--secure-port",
        str(port),
    ]
    server += ["--tls-cert-file", certificate, "--tls-private-key-file", key, "--client-ca-file", certificate]
    server += ["--kubeconfig", nowhere, "--authorization-kubeconfig", nowhere, "--authentication-kubeconfig", nowhere]
    server += ["--authentication-skip-lookup", "--enable-priority-and-fairness=false"]
    server += ["--disable-admission-plugins", ",".join(_NO_ADMISSION)]
    address = Address(f"https://127.0.0.1:{port}", certificate, key)
    with _process(storage, folder / "etcd.log"), _process(server, folder / "server.log") as process:
        _wait_ready(address, process, folder / "server.log")
        yield address


def _wait_ready(address: Address, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address.url}/healthz", context=address.context(), timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    state = "ended" if process.poll() is not None else f"not ready after {READY_S:.0f} s"
    raise ClusterError(f"apiextensions-apiserver: {state}\n{log.read_text(errors='replace')[-3000:]}")
