"""Choose the source of the programs of Kubernetes, and store downloaded or built programs in the cache."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.kubernetes import archive, build
from devcluster.kubernetes.release import (
    CLIENT,
    PROGRAMS,
    STORE,
    Release,
    architecture,
    check_folder,
    default_release,
    parse_release,
)
from devcluster.locks import locked
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.shell import run


@dataclass(frozen=True)
class Kubernetes:
    """The Kubernetes that a cluster must run.

    `folder`: folder with the programs; None to use the cache, a download or a build. `release`: the required version;
    None for the version in `folder`, or for the default release without a folder.
    """

    folder: Path | None = None
    release: Release | None = None


def provide(wanted: Kubernetes, progress: Progress) -> tuple[Path, Release]:
    """Return a folder with the Kubernetes programs, and their release. Print one line with their origin.

    Try in this order: the folder that the user names, the cache, an official release archive, a build.
    Raise ClusterError if a named folder is unsuitable or the build fails. The cache never contains incomplete results.
    """
    if wanted.folder:
        folder = wanted.folder.resolve()
        check_folder(folder)
        release = _said_version(folder)
        if wanted.release and wanted.release != release:
            raise ClusterError(
                f"--kubernetes {folder}: found Kubernetes {release} in this folder; expected {wanted.release}, as "
                "--kubernetes-version says. Remove one of the two options"
            )
        progress.say(f"Kubernetes {release}: from {folder}")
        return folder, release
    release = wanted.release or default_release()
    for kept in _cached(release):
        progress.say(f"Kubernetes {release}: from the cache")
        return kept, release
    with locked("kubernetes"):
        for kept in _cached(release):  # another process has made it meanwhile
            return kept, release
        return _make(release, progress), release


def client(folder: Path) -> Path | None:
    """Return the path of kubectl in `folder`, or None if the folder (such as one that a user chose) has none."""
    return _in(folder, CLIENT)


def store(folder: Path) -> Path | None:
    """Return the path of etcd in `folder`, or None if it has none: release archives of Kubernetes have none."""
    return _in(folder, STORE)


def _in(folder: Path, name: str) -> Path | None:
    return folder / name if (folder / name).exists() else None


def _cached(release: Release) -> Iterator[Path]:
    for name in (f"{_stem(release)}-release", f"{_stem(release)}-{build.digest(release)}"):
        folder = cache_root() / "kubernetes" / name
        if folder.is_dir():
            yield folder


def _stem(release: Release) -> str:
    return f"v{release}-{architecture()}"


def _make(release: Release, progress: Progress) -> Path:
    parent = cache_root() / "kubernetes"
    parent.mkdir(parents=True, exist_ok=True)
    with _work_folder(parent) as work:
        fetched = archive.fetch(release, work, progress)
        if fetched:
            check_folder(fetched)
            target, how = parent / f"{_stem(release)}-release", "official release archive, SHA-512 checked"
        else:
            check_space(parent, build.NEEDED_NBYTES, f"building Kubernetes {release}")
            fetched = build.build(release, work, progress)
            target, how = parent / f"{_stem(release)}-{build.digest(release)}", "built from its Go modules"
            shutil.rmtree(parent / build.COMPILED, ignore_errors=True)
        if _said_version(fetched) != release:
            raise ClusterError(
                f"{fetched}: found Kubernetes {_said_version(fetched)}; expected {release}. "
                "Pass --kubernetes DIR with the programs of this release"
            )
        fetched.rename(target)
    progress.say(f"Kubernetes {release}: {how}")
    return target


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    work = parent / "work"
    shutil.rmtree(work, ignore_errors=True)  # left by a run that was killed
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_space(folder: Path, needed_nbytes: int, purpose: str) -> None:
    """Raise ClusterError unless the file system of `folder` has `needed_nbytes` free. `purpose`: for the message."""
    free = shutil.disk_usage(folder).free
    if free < needed_nbytes:
        raise ClusterError(
            f"{folder}: found {free / 1e9:.1f} GB free; expected {needed_nbytes / 1e9:.1f} GB for {purpose}. "
            "Free some space, or set XDG_CACHE_HOME to a folder on a larger disk"
        )


def _said_version(folder: Path) -> Release:
    program = folder / PROGRAMS[0]
    said = run([program, "--version"], check=False, timeout_s=60).stdout
    match = re.search(r"v(\d+\.\d+\.\d+)", said)
    if not match:
        raise ClusterError(
            f"{program}: found {said.strip()!r} as its version; expected a release of Kubernetes, such as v1.36.3. "
            "Pass a folder with released programs as --kubernetes DIR"
        )
    return parse_release(match[1])
