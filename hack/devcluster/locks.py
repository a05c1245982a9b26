"""Locks between commands that run at the same time; the kernel releases them however their holder ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.paths import cache_root


@contextmanager
def locked(name: str, folder: Path | None = None) -> Iterator[None]:
    """Holds the lock `name` of this user's cache (or of another folder), waiting for it as long as it takes."""
    path = (folder or cache_root() / "locks") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
