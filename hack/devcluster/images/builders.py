"""The two builders of images: Docker if it works, otherwise buildah as root. Both build the same Dockerfiles."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from devcluster.embedded import packages
from devcluster.errors import ClusterError
from devcluster.images import pip_config
from devcluster.images.base import debian_base
from devcluster.images.inputs import Image
from devcluster.images.oci_layout import Layout
from devcluster.locks import locked
from devcluster.paths import REPOSITORY, cache_root
from devcluster.progress import Progress
from devcluster.shell import have, run

PUBLIC_BASE = "docker.io/library/python:3.11-slim-bookworm"
_BUILD_LIMIT_S = 3600
_PULL_LIMIT_S = 120
_KEPT_VERSIONS = 3
# Runs buildah or skopeo in a separate mount namespace, so that the mounts of its storage end with the command.
_PRIVATE_MOUNTS = ("unshare", "--mount", "--propagation", "private")
_TIMESTAMP = "1700000000"  # fixed time of all files in a layer, so that equal inputs give equal layers


class Builder(Protocol):
    """Interface of a builder. It stores built images so that a provider's `load` can use them."""

    name: str

    def build(self, image: Image, reference: str, arguments: Mapping[str, str]) -> None:
        """Build an image with the build arguments `arguments` and store it under `reference`."""

    def has(self, reference: str) -> bool:
        """Return True if the image `reference` has already been built."""

    def archives(self, references: Sequence[str], folder: Path) -> list[Path]:
        """Return the images as archive files or an OCI layout for `Provider.load`. `folder`: for temporary files."""

    def push(self, reference: str) -> None:
        """Push the image to the registry that its reference contains."""


def docker_works() -> bool:
    """Return True if there is a Docker client and its engine answers."""
    if not have("docker"):
        return False
    return run(["docker", "version", "--format", "{{.Server.Version}}"], check=False, timeout_s=20).returncode == 0


def has_buildkit() -> bool:
    """Return True if this Docker client can use BuildKit. From version 23.0 on, it needs the plugin buildx for this."""
    if run(["docker", "buildx", "version"], check=False, timeout_s=20).returncode == 0:
        return True
    said = run(["docker", "version", "--format", "{{.Client.Version}}"], check=False, timeout_s=20).stdout
    match = re.match(r"(\d+)\.", said.strip())
    return match is not None and int(match[1]) < 23


def without_mounts(dockerfile: str) -> str:
    """Return the text of a Dockerfile without the option `--mount=…` of its RUN instructions.

    Docker's classic builder (without BuildKit) rejects this option. The repository's Dockerfiles also build without
    their mounts, which only provide pip's configuration and a cache for uv. The cache of uv is disabled as well,
    because without its mount it would become a part of the image.
    """
    plain = re.sub(r"--mount=\S+\s+(\\\n\s*)?", "", dockerfile)
    return plain.replace("UV_CACHE_DIR=/var/cache/uv", "UV_NO_CACHE=1")


def choose(progress: Progress) -> Builder:
    """Return the builder for this machine. Raise ClusterError if there is none."""
    if docker_works():
        return Docker(progress)
    if os.geteuid() == 0 and (have("buildah") or have("apt-get")):
        return Buildah(progress)
    raise ClusterError(
        "image builder: found neither Docker nor, as root on Debian or Ubuntu, buildah; expected one of them. Install "
        "Docker, or run this command as root"
    )


@dataclass
class Docker:
    """A builder that runs `docker build`. The Docker engine stores the images."""

    progress: Progress
    name: str = "docker"

    def has(self, reference: str) -> bool:
        return run(["docker", "image", "inspect", reference], check=False).returncode == 0

    def build(self, image: Image, reference: str, arguments: Mapping[str, str]) -> None:
        buildkit = has_buildkit()
        if not buildkit:
            self.progress.say("this Docker client has no buildx: the engine's classic builder builds, without this "
                              "machine's pip configuration and caches")  # fmt: skip
        with _secrets() as secrets, tempfile.TemporaryDirectory(prefix="dljob-docker-") as folder:
            dockerfile = REPOSITORY / image.dockerfile
            if not buildkit:
                plain = Path(folder, "Dockerfile")
                plain.write_text(without_mounts(dockerfile.read_text()))
                dockerfile, secrets = plain, _flags("--build-arg", pip_config.proxies(os.environ))
            run(
                [
                    *("docker", "build", "--network=host", "--file", str(dockerfile)),
                    *("--tag", reference, *_flags("--build-arg", {"SOURCE_DATE_EPOCH": _TIMESTAMP, **arguments})),
                    *(*secrets, str(REPOSITORY)),
                ],
                env={"DOCKER_BUILDKIT": "1" if buildkit else "0"},
                timeout_s=_BUILD_LIMIT_S,
                log=cache_root() / "images" / f"{image.name}.log",
            )

    def archives(self, references: Sequence[str], folder: Path) -> list[Path]:
        archive = folder / "images.tar"
        run(["docker", "save", "--output", archive, *references], timeout_s=_BUILD_LIMIT_S)
        return [archive]

    def push(self, reference: str) -> None:
        run(["docker", "push", reference], timeout_s=_BUILD_LIMIT_S)


class Buildah:
    """A builder that runs buildah, without a daemon. The OCI layout in the cache stores the images."""

    name = "buildah"

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.layout = Layout(cache_root() / "images" / "layout")

    def has(self, reference: str) -> bool:
        return reference in self.layout.images()

    def build(self, image: Image, reference: str, arguments: Mapping[str, str]) -> None:
        packages.install(packages.IMAGE_BUILD, self._progress)
        base = arguments.get("BASE") or self.base()
        with _secrets() as secrets:
            self._buildah(
                *("build", "--isolation", "chroot", "--network", "host", "--layers", "--timestamp", _TIMESTAMP),
                *("--format", "oci", "--file", str(REPOSITORY / image.dockerfile), "--tag", reference, "--pull-never"),
                *_flags("--build-arg", {**arguments, "BASE": base}),
                *(*secrets, str(REPOSITORY)),
                log=cache_root() / "images" / f"{image.name}.log",
            )
        with locked("images"):
            self._export(reference)
            forgotten = self.layout.keep_newest(_KEPT_VERSIONS)
        for old in forgotten:
            self._buildah("rmi", old, check=False)

    def archives(self, references: Sequence[str], folder: Path) -> list[Path]:
        return [self.layout.folder]

    def push(self, reference: str) -> None:
        self._buildah("push", reference, f"docker://{reference}")

    def base(self) -> str:
        """Return the public base image if a registry answers soon, else one made by debootstrap.

        The cache stores the decision for later builds.
        """
        note = cache_root() / "images" / "base"
        if note.exists() and self._exists(note.read_text()):
            return note.read_text()
        pulled = self._buildah("pull", "--quiet", PUBLIC_BASE, check=False, timeout_s=_PULL_LIMIT_S)
        base = PUBLIC_BASE if pulled else debian_base(self._buildah, self._progress)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(base)
        return base

    def save(self, reference: str, archive: Path, name: str) -> None:
        """Write a local image to a docker archive, in which it has the name `name`."""
        self._buildah("push", reference, f"docker-archive:{archive}:{name}")

    def _exists(self, reference: str) -> bool:
        return self._buildah("inspect", "--type", "image", reference, check=False)

    def _buildah(
        self, *words: str, check: bool = True, timeout_s: float = _BUILD_LIMIT_S, log: Path | None = None
    ) -> bool:
        with tempfile.TemporaryDirectory(prefix="dljob-buildah-") as scratch:
            folders = ["--storage-driver", "overlay", "--root", str(_storage()), "--runroot", scratch]
            command = [*_PRIVATE_MOUNTS, "buildah", *folders, *words]
            done = run(command, check=check, timeout_s=timeout_s, log=log, env={"TMPDIR": str(_temporary())})
        return done.returncode == 0

    def _export(self, reference: str) -> None:
        """Add missing layers of the image to the OCI layout, uncompressed, so that nodes can unpack them fast."""
        self.layout.create()
        with tempfile.TemporaryDirectory(prefix="dljob-skopeo-") as scratch:
            source = f"containers-storage:[overlay@{_storage()}+{scratch}]{reference}"
            options = ["--insecure-policy", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers"]
            target = f"oci:{self.layout.folder}:{reference}"
            run([*_PRIVATE_MOUNTS, "skopeo", *options, source, target], timeout_s=_BUILD_LIMIT_S)


def _storage() -> Path:
    folder = cache_root() / "buildah"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _temporary() -> Path:
    """Return the folder for buildah's temporary files.

    buildah stores the cache mounts of Dockerfiles in it. The folder contains a link from the cache mount `dljob-uv` to
    this machine's cache folder for uv, so that all builds share downloaded packages.
    """
    mounts = cache_root() / "images" / "tmp" / "buildah-cache"
    mounts.mkdir(parents=True, exist_ok=True)
    (cache_root() / "uv").mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (mounts / "dljob-uv").symlink_to(cache_root() / "uv")
    return mounts.parent


@contextmanager
def _secrets() -> Iterator[list[str]]:
    """Yield the command-line flags that pass pip's configuration (as secrets) and proxies to a build.

    Inside the context, package indexes in local folders are served over HTTP, because a build cannot read the folders.
    """
    config = pip_config.read()
    with pip_config.serving(config) as served, tempfile.TemporaryDirectory(prefix="dljob-pip-") as folder:
        conf, environment = Path(folder, "pip.conf"), Path(folder, "uv.env")
        conf.write_text(pip_config.render(config, served))
        environment.write_text(pip_config.render_for_uv(config, served))
        flags = ["--secret", f"id=pip_conf,src={conf}", "--secret", f"id=uv_env,src={environment}"]
        if config.ca_bundle:
            flags += ["--secret", f"id=pip_ca,src={config.ca_bundle}"]
        yield [*flags, *_flags("--build-arg", pip_config.proxies(os.environ))]


def _flags(name: str, values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in (name, f"{key}={value}")]
