"""Choose the build of PyTorch: the CPU build if its index answers and this machine has no GPU, else that of PyPI."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path

from devcluster.paths import REPOSITORY, cache_root

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_DOCKERFILE = REPOSITORY / "trainer-image" / "Dockerfile"
_LIMIT_S = 5.0


def requirement() -> str:
    """Return the requirement that the trainer's Dockerfile pins, such as `torch==2.13.0`."""
    match = re.search(r"^ARG TORCH=(\S+)$", _DOCKERFILE.read_text(), re.MULTILINE)
    assert match, f"{_DOCKERFILE} has no line ARG TORCH="
    return match[1]


def index() -> str:
    """Return the address of the index with the CPU build, or an empty text for PyPI. The cache stores the decision.

    PyPI's build for Linux is the CUDA build: 2.7 GB to download where the CPU build has 0.2 GB.
    """
    note = cache_root() / "images" / "torch-index"
    if note.exists():
        return note.read_text()
    chosen = CPU_INDEX if not _has_gpu() and _answers(f"{CPU_INDEX}/torch/") else ""
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(chosen)
    return chosen


def _has_gpu() -> bool:
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/kfd"))


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=_LIMIT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.stdout.write(f"{requirement()} {index()}\n")
