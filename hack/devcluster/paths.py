"""Paths on disk: the cache, which `down` does not delete, and the state of one running cluster.

Both must be on one file system, because nodes use hard links to the image store in the cache.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def cache_root() -> Path:
    """Return the cache folder. The variable XDG_CACHE_HOME overrides its parent folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dljob"


def cluster_dir(name: str) -> Path:
    """Return the state folder of the cluster `name`, which `hack/cluster down` deletes.

    The variable DLJOB_CLUSTER_DIR overrides it.
    """
    override = os.environ.get("DLJOB_CLUSTER_DIR")
    return Path(override).resolve() / name if override else cache_root() / "cluster" / name
