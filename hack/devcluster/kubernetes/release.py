"""Describe a release of Kubernetes: its version, its programs, and the releases that dljob supports."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import ClusterError

MODULE = Path(__file__).resolve().parents[2] / "kubernetes"
"""The Go module that pins the default release."""
OLDEST_SUPPORTED = "1.30.0"
"""The oldest release on which `hack/test full` runs the API tests."""
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
CLIENT = "kubectl"
STORE = "etcd"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_ELF_MACHINES = {62: "amd64", 183: "arm64"}


@dataclass(frozen=True, order=True)
class Release:
    """A release with its version, such as 1.36.3. Releases are ordered by version."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


def parse_release(text: str) -> Release:
    """Return the release that `text` names, such as `1.36.3` or `v1.36.3`.

    Raise ValueError unless `text` is a full version from 1.30 on.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)", text)
    oldest = re.fullmatch(r"(\d+)\.(\d+)\.\d+", OLDEST_SUPPORTED)
    assert oldest
    if not match:
        raise ValueError(
            f"--kubernetes-version: found {text!r}; expected a release of Kubernetes such as {default_release()}"
        )
    release = Release(*map(int, match.groups()))
    if (release.major, release.minor) < (int(oldest[1]), int(oldest[2])) or release.major != 1:
        raise ValueError(
            f"--kubernetes-version: found {text!r}; expected 1.{oldest[2]}.0 or later, because older releases of "
            "Kubernetes are not supported"
        )
    return release


def default_release() -> Release:
    """Return the release that hack/kubernetes/go.mod pins."""
    match = re.search(r"\bk8s\.io/kubernetes v(\d+)\.(\d+)\.(\d+)$", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert match, f"{MODULE}/go.mod requires no k8s.io/kubernetes"
    return Release(*map(int, match.groups()))


def architecture() -> str:
    """Return this machine's architecture as Go and Kubernetes name it, such as amd64."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def check_folder(folder: Path) -> None:
    """Raise ClusterError unless `folder` contains all programs for this machine's architecture."""
    absent = [name for name in PROGRAMS if not (folder / name).is_file()]
    if absent:
        raise ClusterError(
            f"--kubernetes {folder}: found no {', '.join(absent)} in this folder; expected the programs "
            f"{', '.join(PROGRAMS)}"
        )
    for name in PROGRAMS:
        found = _elf_architecture(folder / name)
        if found != architecture():
            raise ClusterError(
                f"--kubernetes {folder}: found {name} for {found}; expected {architecture()}: "
                "download the archive for this machine's architecture"
            )


def _elf_architecture(path: Path) -> str:
    """Return the architecture in a program's ELF header (bytes 18 and 19), or a description of another file type."""
    with path.open("rb") as file:
        head = file.read(20)
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return "no Linux program"
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return _ELF_MACHINES.get(number, f"ELF machine {number}")
