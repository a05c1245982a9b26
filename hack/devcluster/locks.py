"""Locks between commands that run at the same time. The kernel releases a lock when its process ends for any reason."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.paths import cache_root


@contextmanager
def locked(name: str, folder: Path | None = None) -> Iterator[None]:
    """Acquire the lock file `name` before the context begins, and release it when the context ends.

    Wait for the lock without a time limit. `folder`: folder of the lock file; None for a folder in this user's cache.
    """
    path = (folder or cache_root() / "locks") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
