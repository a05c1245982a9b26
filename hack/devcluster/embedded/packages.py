"""Install the Debian packages that the embedded cluster needs and that are missing, without starting services."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.locks import locked
from devcluster.progress import Progress
from devcluster.shell import find, run

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

# Required program (on PATH, or an absolute path) → package that contains it.
RUNTIME: Mapping[str, str] = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "dnsmasq": "dnsmasq-base",
    "openssl": "openssl",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mount": "mount",
}
STORE: Mapping[str, str] = {"etcd": "etcd-server"}
"""For Kubernetes programs that came without etcd."""
IMAGE_BUILD: Mapping[str, str] = {
    "buildah": "buildah",
    "skopeo": "skopeo",
    "debootstrap": "debootstrap",
    KEYRING: "debian-archive-keyring",
}

SUITE = "bookworm"  # Debian release of the base image; this machine may run another one

_POLICY = Path("/usr/sbin/policy-rc.d")  # prevents packages from starting their services


def debian_mirror() -> str:
    """Return the address of the mirror of Debian's SUITE that this machine uses, or of the public mirror."""
    form = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)"
    for line in run(["apt-get", "indextargets", "--format", form], check=False).stdout.splitlines():
        origin, codename, uri = (*line.split("|"), "", "", "")[:3]
        if (origin, codename) == ("Debian", SUITE):
            return uri.rstrip("/")
    return "http://deb.debian.org/debian"


def missing(wanted: Mapping[str, str]) -> list[str]:
    """Return the packages of `wanted` that must be installed, sorted.

    `wanted`: name of a program, or absolute path → Debian package that contains it.
    """
    absent = {
        package
        for program, package in wanted.items()
        if not (Path(program).exists() if program.startswith("/") else find(program))
    }
    return sorted(absent)


def install(wanted: Mapping[str, str], progress: Progress) -> None:
    """Install the packages that `missing` returns. Raise ClusterError if this fails.

    Update the package lists only if the first attempt fails.
    """
    if missing(wanted):
        with locked("packages"):
            _install(missing(wanted), progress)


def _install(packages: Sequence[str], progress: Progress) -> None:
    if not packages:
        return
    if os.geteuid() != 0:
        raise ClusterError(
            f"system packages {' '.join(packages)}: found them missing; expected them on this machine. Run this "
            "command as root, or install them with apt-get install"
        )
    command = ["apt-get", "install", "--yes", "--no-install-recommends", "-oDPkg::Lock::Timeout=300", *packages]
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    with progress.step(f"installing {' '.join(packages)}"):
        created = _hold_services()
        try:
            if run(command, timeout_s=900, env=env, check=False).returncode:
                run(["apt-get", "update"], timeout_s=300)
                run(command, timeout_s=900, env=env)
        finally:
            if created:
                _POLICY.unlink()


def _hold_services() -> bool:
    if _POLICY.exists():
        return False
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    return True
