"""Where things live on disk: the cache that survives `down`, and the state of one running cluster.

Both are on one file system on purpose: nodes take over the image store by hard links.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def cache_root() -> Path:
    """The cache folder; "cold" means that it is empty. Override with XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dljob"


def cluster_dir(name: str) -> Path:
    """State of the cluster `name`: gone after `hack/cluster down`. Override with DLJOB_CLUSTER_DIR."""
    override = os.environ.get("DLJOB_CLUSTER_DIR")
    return Path(override).resolve() / name if override else cache_root() / "cluster" / name
