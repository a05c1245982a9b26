"""Locks between commands that run at the same time. The kernel releases a lock when its process ends for any reason."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.paths import cache_root


@contextmanager
def locked(name: str, folder: Path | None = None) -> Iterator[None]:
    """Lock `name` in this user's cache, or in `folder`, inside the context. Wait for the lock without a limit."""
    path = (folder or cache_root() / "locks") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
