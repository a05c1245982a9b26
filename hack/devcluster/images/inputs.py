"""The inputs of images and their digest. The digest is an image's tag and decides whether to build the image."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from devcluster.paths import REPOSITORY

# Both images contain dlcontract. Each also contains its own distribution.
_COMMON = (".dockerignore", "LICENSE", "hack/locks/uv.txt", "hack/precompile.py", "operator/contract")


@dataclass(frozen=True)
class Image:
    """One image of this repository. `inputs`: paths of its files, relative to the root of the repository."""

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    needed_nbytes: int
    """Disk space for the first build and its copy in the cluster's image store, with some reserve, in bytes."""
    expected_s: float
    """Usual duration of the first build on two cores, in seconds."""


def _own(folder: str, package: str) -> tuple[str, ...]:
    return (f"{folder}/pyproject.toml", f"{folder}/requirements.txt", f"{folder}/{package}")


IMAGES = {
    "operator": Image("operator", "operator/Dockerfile", (*_COMMON, *_own("operator", "dljob")), 2 << 30, 60),
    "trainer": Image(
        "trainer",
        "trainer-image/Dockerfile",
        (*_COMMON, *_own("trainer-image", "dltrain"), "trainer-image/setup.py", "trainer-image/injection"),
        24 << 30,
        150,
    ),
}


def digest(image: Image, arguments: Mapping[str, str], root: Path = REPOSITORY) -> str:
    """Return a digest of 12 hexadecimal digits of all inputs: files (path, mode, content) and build arguments."""
    total = hashlib.sha256(json.dumps(dict(sorted(arguments.items()))).encode())
    for path in files(image, root):
        executable = os.access(path, os.X_OK)
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root)}\0{executable}\0{content}\n".encode())
    return total.hexdigest()[:12]


def files(image: Image, root: Path = REPOSITORY) -> Iterator[Path]:
    """Yield all files that the build uses, in a fixed order, without what Python and compilers made of them."""
    for name in sorted((image.dockerfile, *image.inputs)):
        path = root / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (one for one in found if one.is_file() and "__pycache__" not in one.parts and one.suffix != ".so")


def reference(image: Image, arguments: Mapping[str, str], registry: str | None, root: Path = REPOSITORY) -> str:
    """Return the image's reference. `registry`: None for clusters on this machine, which use `localhost`."""
    return f"{registry or 'localhost'}/dljob-{image.name}:{digest(image, arguments, root)}"
