"""Find kind, or install it into the cache: as a Go module, or from its release with the published SHA-256."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.kubernetes.release import architecture
from devcluster.locks import locked
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.shell import find, run

VERSION = "0.33.0"
_RELEASES = "https://kind.sigs.k8s.io/dl"
_LIMIT_S = 600


def program() -> str | None:
    """Return the path of the program kind, from PATH or from the cache; None if neither has it."""
    cached = _cached()
    return find("kind") or (str(cached) if cached.exists() else None)


def install(progress: Progress) -> str:
    """Return the path of kind. Install it into the cache if necessary. Raise ClusterError if this fails."""
    if there := program():
        return there
    with locked("kind"):
        if not _cached().exists():
            with progress.step(f"installing kind {VERSION} into {_cached().parent}", expected_s=60):
                how = "its Go module" if _from_module() else _from_release()
            progress.say(f"kind {VERSION}: from {how}")
    return str(_cached())


def _cached() -> Path:
    return cache_root() / "kind" / VERSION / "kind"


def _from_module() -> bool:
    if not find("go"):
        return False
    folder = _cached().parent
    folder.mkdir(parents=True, exist_ok=True)
    env = {"GOBIN": str(folder), "GOFLAGS": "", "GO111MODULE": "on", "CGO_ENABLED": "0"}
    done = run(["go", "install", f"sigs.k8s.io/kind@v{VERSION}"], env=env, check=False, timeout_s=_LIMIT_S)
    return done.returncode == 0 and _cached().exists()


def _from_release() -> str:
    address = f"{_server()}/v{VERSION}/kind-linux-{architecture()}"
    try:
        with urllib.request.urlopen(f"{address}.sha256sum", timeout=10) as answer:
            expected = answer.read(256).decode(errors="replace").split()[0]
        with urllib.request.urlopen(address, timeout=60) as answer:
            content: bytes = answer.read()
    except (OSError, ValueError, IndexError) as failure:
        raise ClusterError(
            f"kind (Kubernetes in Docker): found none on PATH, and neither its Go module nor {address} could be "
            f"downloaded ({failure}); expected one of them. Install kind (https://kind.sigs.k8s.io), or run this as "
            "root on Debian or Ubuntu, which uses the embedded cluster"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ClusterError(
            f"{address}: found a download with SHA-256 {found[:16]}…; expected {expected[:16]}…, as published. The "
            "file is damaged or was replaced. Install kind yourself"
        )
    _cached().parent.mkdir(parents=True, exist_ok=True)
    scratch = _cached().with_suffix(".new")
    scratch.write_bytes(content)
    scratch.chmod(0o755)
    scratch.rename(_cached())
    return "its release, SHA-256 checked"


def _server() -> str:
    return os.environ.get("DLJOB_KIND_RELEASES", _RELEASES).rstrip("/")
