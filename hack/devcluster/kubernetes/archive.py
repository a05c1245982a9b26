"""Fetch the programs of Kubernetes from an official release archive, checked against its SHA-512."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.kubernetes.release import CLIENT, PROGRAMS, Release, architecture
from devcluster.progress import Progress

DEFAULT_SERVER = "https://dl.k8s.io"
_CONNECT_LIMIT_S = 5.0
_CHUNK = 1 << 20


def server() -> str:
    """Return the base address of release archives. The variable DLJOB_KUBERNETES_ARCHIVES overrides it."""
    return os.environ.get("DLJOB_KUBERNETES_ARCHIVES", DEFAULT_SERVER).rstrip("/")


def fetch(release: Release, work: Path, progress: Progress) -> Path | None:
    """Download a release archive. Return a folder below `work` with its programs.

    Return None if the server does not answer or does not have the release, or if the download is interrupted. Raise
    ClusterError if the downloaded archive does not match its published SHA-512.
    """
    address = f"{server()}/v{release}/kubernetes-server-linux-{architecture()}.tar.gz"
    expected = _published_digest(address)
    if expected is None:
        return None
    archive = work / "kubernetes-server.tar.gz"
    with progress.step(f"downloading Kubernetes {release} (official release archive)", expected_s=60):
        try:
            found = _download(address, archive)
        except OSError as failure:
            progress.say(f"the download stopped ({failure}): building Kubernetes instead")
            return None
    if found != expected:
        raise ClusterError(
            f"{address}: found a download with SHA-512 {found[:16]}…; expected {expected[:16]}…, as published. The "
            "file is damaged or was replaced. Check the server, or pass --kubernetes DIR with the programs of "
            "Kubernetes"
        )
    return _unpack(archive, work / "bin")


def _published_digest(address: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{address}.sha512", timeout=_CONNECT_LIMIT_S) as answer:
            words: list[str] = answer.read(1024).decode(errors="replace").split()
    except (OSError, ValueError):  # no route, no name, a refusal, or no such file
        return None
    digest = words[0].lower() if words else ""
    return digest if len(digest) == 128 and set(digest) <= set("0123456789abcdef") else None


def _download(address: str, target: Path) -> str:
    """Download the file at `address` to `target`. Return its SHA-512 in hexadecimal."""
    digest = hashlib.sha512()
    with urllib.request.urlopen(address, timeout=60) as answer, target.open("wb") as file:
        while chunk := answer.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack kubectl and the Kubernetes programs that a cluster runs; skip other files. Return their folder."""
    folder.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            if member.isfile() and member.name.startswith("kubernetes/server/bin/") and name in (*PROGRAMS, CLIENT):
                source = tar.extractfile(member)
                assert source
                with source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target, _CHUNK)
                (folder / name).chmod(0o755)
    archive.unlink()
    return folder
