"""What an image is made of, and the digest of all of it: the image's tag, and the reason to build it or not."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from devcluster.paths import REPOSITORY

# Both images carry the contract; each of them its own distribution.
_COMMON = (".dockerignore", "LICENSE", "hack/locks/uv.txt", "hack/precompile.py", "operator/contract")


@dataclass(frozen=True)
class Image:
    """One image of this repository; `inputs` are paths below its root."""

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    needed_nbytes: int
    """Disk space that the first build and its copy in the cluster's image store take, with some reserve."""
    expected_s: float
    """Usual duration of the first build on two cores."""


def _own(folder: str, package: str) -> tuple[str, ...]:
    return (f"{folder}/pyproject.toml", f"{folder}/requirements.txt", f"{folder}/{package}")


IMAGES = {
    "operator": Image("operator", "operator/Dockerfile", (*_COMMON, *_own("operator", "dljob")), 2 << 30, 60),
    "trainer": Image(
        "trainer", "trainer-image/Dockerfile", (*_COMMON, *_own("trainer-image", "dltrain")), 24 << 30, 150
    ),
}


def digest(image: Image, arguments: Mapping[str, str], root: Path = REPOSITORY) -> str:
    """Twelve hexadecimal digits of everything that goes in: files (path, mode, content) and build arguments."""
    total = hashlib.sha256(json.dumps(dict(sorted(arguments.items()))).encode())
    for path in files(image, root):
        executable = os.access(path, os.X_OK)
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root)}\0{executable}\0{content}\n".encode())
    return total.hexdigest()[:12]


def files(image: Image, root: Path = REPOSITORY) -> Iterator[Path]:
    """Every file that the build sees, in a fixed order; never caches of Python."""
    for name in sorted((image.dockerfile, *image.inputs)):
        path = root / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (one for one in found if one.is_file() and "__pycache__" not in one.parts)


def reference(image: Image, arguments: Mapping[str, str], registry: str | None, root: Path = REPOSITORY) -> str:
    """The image's name and tag, below a registry or, for clusters of this machine, below `localhost`."""
    return f"{registry or 'localhost'}/dljob-{image.name}:{digest(image, arguments, root)}"
