"""Pins what an image holds: asks pip for the closure of what pyproject.toml names, and writes it down."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.images.inputs import Image
from devcluster.paths import REPOSITORY
from devcluster.shell import run

_PYTHON = "3.11"  # of the base image
_LEFT_OUT = ("torch",)  # users choose their build of it: the Dockerfile's argument TORCH

_HEAD = """\
# What the {name} image holds, exactly: the closure of dljob[{name}]{note}.
# Checked against pyproject.toml by tests/cluster/test_images.py; made anew by: hack/images --lock
"""


def constraints(image: Image, root: Path = REPOSITORY) -> Path:
    """The file with an image's pins, beside its Dockerfile."""
    return (root / image.dockerfile).with_name("constraints.txt")


def write(image: Image) -> None:
    """Resolves for the base image's Python, and for torch as the Dockerfile pins it."""
    import tomllib  # not in the oldest Python that the other commands run on

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][image.name]]
    with tempfile.TemporaryDirectory(prefix="dljob-lock-") as folder:
        report = Path(folder, "report.json")
        run(
            [
                *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
                *("--only-binary=:all:", "--python-version", _PYTHON, "--target", f"{folder}/target"),
                *("--report", str(report), *wanted, *_torch(image)),
            ],
            timeout_s=600,
        )
        resolved = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    pins = {one["name"].lower().replace("_", "-"): one["version"] for one in resolved}
    if not pins:
        raise ClusterError(f"pip resolved nothing for {wanted}")
    left_out = [pins.pop(name) for name in _LEFT_OUT if name in pins]
    head = _HEAD.format(name=image.name, note=" less torch (build argument TORCH)" if left_out else "")
    constraints(image).write_text(head + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))


def _torch(image: Image) -> list[str]:
    lines = (REPOSITORY / image.dockerfile).read_text().splitlines()
    return [line.partition("ARG TORCH=")[2] for line in lines if line.startswith("ARG TORCH=")]
