"""Progress lines on standard error, each with the time since the start and its own duration."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Prints what is being done; safe to use from several threads."""

    def __init__(self, quiet: bool = False) -> None:
        self._start_s = time.monotonic()
        self._quiet = quiet
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def say(self, message: str) -> None:
        """One line, prefixed by the seconds since the command began."""
        if self._quiet:
            return
        with self._lock:
            print(f"[{self.elapsed_s:6.1f}s] {message}", file=sys.stderr, flush=True)

    @contextmanager
    def step(self, message: str) -> Iterator[None]:
        """Announces a step that takes long enough to wonder about, and its duration when it is done."""
        self.say(f"{message} ...")
        begun_s = time.monotonic()
        yield
        self.say(f"{message}: {time.monotonic() - begun_s:.1f} s")
