"""An image for the scripts of ``examples/programs``: the trainer image, and the training libraries that they import.

Also the packages to which run reports are exported, for processes of this machine.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.images.oci_layout import Layout
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.providers import choose
from support.cluster.kubectl import ROOT

PROGRAMS = ROOT / "examples/programs"
REQUIREMENTS = PROGRAMS / "requirements.txt"
SITE_PACKAGES = "opt/dljob/lib/python3.11/site-packages"
SOURCES = ("deepspeed",)
"""Packages without a wheel, which the setuptools of this environment builds. They are Python for any version."""


@contextmanager
def added_images() -> Iterator[Layout]:
    """Yield a layout with all images that hack/images has built. Load what the test adds to it into the nodes."""
    with tempfile.TemporaryDirectory(dir=cache_root() / "images", prefix="programs-") as folder:
        shutil.copytree(cache_root() / "images/layout", folder, copy_function=os.link, dirs_exist_ok=True)
        layout = Layout(Path(folder))
        yield layout
        layout.keep_newest(1)
        choose(None, os.environ["DLJOB_TEST_CLUSTER"], Progress(quiet=True)).load([layout.folder])


def add_program_image(layout: Layout, trainer: str) -> str:
    """Add the image of the programs to the layout, and return its reference.

    ``trainer``: reference of the trainer image.
    """
    reference = f"localhost/dljob-programs:{trainer.rpartition(':')[2]}"
    layout.add_layer(reference, trainer, libraries(), SITE_PACKAGES)
    return reference


def libraries() -> Path:
    """Return the libraries without PyTorch, which is in the trainer image. The first call downloads them."""
    return _packages("programs", REQUIREMENTS, "3.11")


def s3_server() -> Path:
    """Return moto's server and what it needs, without what the trainer image has. The first call downloads them."""
    return _packages("s3-server", ROOT / "hack/locks/s3-server.txt", "3.11")


def export_libraries() -> Path:
    """Return TensorBoard, MLflow and W&B for this Python, beside its environment. The first call downloads them."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return _packages(f"exports-{version}", ROOT / "hack/locks/exports.txt", version)


def _packages(name: str, requirements: Path, python: str) -> Path:
    """Return a folder with the packages of a lock for a version of Python. Its name begins with ``name``."""
    made = cache_root() / "images" / f"{name}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    if not made.is_dir():
        new = made.with_name(f"{made.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", new)
        wheels = ("--no-deps", "--no-compile", "--only-binary=:all:", f"--python-version={python}")
        sources = (f"--no-binary={','.join(SOURCES)}", "--no-build-isolation")
        subprocess.run([*pip, *wheels, *sources, "--require-hashes", "-r", requirements], check=True, timeout=600)
        new.rename(made)
    return made


def scripts() -> dict[str, str]:
    """Return name → text of the scripts, and of the configuration of Accelerate."""
    return {path.name: path.read_text() for path in sorted((*PROGRAMS.glob("*.py"), PROGRAMS / "accelerate.yml"))}
