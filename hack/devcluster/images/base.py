"""Create a base image without a registry: Debian with Python, made by debootstrap."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from devcluster.embedded import packages
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.shell import run

REFERENCE = f"localhost/dljob-base:{packages.SUITE}"
_CONTAINER = "dljob-base"
# Files that an image never needs: caches of the package manager, documentation, translations.
_SUPERFLUOUS = (
    *("var/cache/apt", "var/lib/apt/lists", "var/log", "var/cache/debconf", "tmp", "usr/share/doc"),
    *("usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian"),
)


def debian_base(buildah: Callable[..., bool], progress: Progress) -> str:
    """Create the base image and return its reference. This takes about 30 s.

    `buildah`: function that runs buildah with the given words as its command line.
    """
    packages.install(packages.IMAGE_BUILD, progress)
    rootfs = cache_root() / "images" / "rootfs"
    shutil.rmtree(rootfs, ignore_errors=True)
    rootfs.parent.mkdir(parents=True, exist_ok=True)
    with progress.step(f"making the base image from Debian {packages.SUITE}"):
        options = ["--variant=minbase", "--include=python3,python3-venv"]
        # A separate mount namespace is needed, because debootstrap mounts /proc below the target.
        run(
            [
                *("unshare", "--mount", "--propagation", "private", "debootstrap", *options),
                *(packages.SUITE, str(rootfs), packages.debian_mirror()),
            ],
            timeout_s=900,
            log=cache_root() / "images" / "base.log",
        )
        _tidy(rootfs)
        buildah("rm", _CONTAINER, check=False)
        buildah("from", "--name", _CONTAINER, "scratch")
        buildah("add", _CONTAINER, str(rootfs), "/")
        buildah("commit", "--format", "oci", "--timestamp", "1700000000", "--rm", _CONTAINER, REFERENCE)
    shutil.rmtree(rootfs)
    return REFERENCE


def _tidy(rootfs: Path) -> None:
    for name in _SUPERFLUOUS:
        for path in (rootfs / name).iterdir() if (rootfs / name).is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    # Files in layers have one fixed time, so Python would consider .pyc files outdated: compile them unchecked.
    compiled = [
        "compileall",
        "-q",
        "-f",
        "--invalidation-mode",
        "unchecked-hash",
        "/usr/lib/python3",
        "/usr/lib/python3.11",
    ]
    run(["chroot", str(rootfs), "python3", "-m", *compiled], timeout_s=300)
