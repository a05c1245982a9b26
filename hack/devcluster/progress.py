"""Print progress on standard error: each line with the time since the start, long steps with the time that is left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_EVERY_S = 15.0


@dataclass
class _Step:
    message: str
    begun_s: float
    expected_s: float


class Progress:
    """Print what is being done, also from several threads.

    While a step with an expected duration runs, one line every 15 s says how far each such step is and how long
    the slowest of them will still take.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._start_s = time.monotonic()
        self._quiet = quiet
        self._lock = threading.Lock()
        self._running: list[_Step] = []
        self._ticking = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def say(self, message: str) -> None:
        """Print one line, prefixed by the seconds since the command began."""
        if self._quiet:
            return
        with self._lock:
            print(f"[{self.elapsed_s:6.1f}s] {message}", file=sys.stderr, flush=True)

    @contextmanager
    def step(self, message: str, expected_s: float = 0.0) -> Iterator[None]:
        """Announce a step that takes long, and print its duration when it is done.

        `expected_s` is its usual duration on two cores; steps that take minutes should give it.
        """
        about = f" (about {_minutes(expected_s)})" if expected_s >= 60 else ""
        self.say(f"{message}{about} ...")
        one = _Step(message, time.monotonic(), expected_s)
        with self._lock:
            self._running.append(one)
            start = expected_s > 0 and not self._ticking and not self._quiet
            self._ticking = self._ticking or start
        if start:
            threading.Thread(target=self._tick, daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(one)
        self.say(f"{message}: {time.monotonic() - one.begun_s:.1f} s")

    def _tick(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            with self._lock:
                running = [one for one in self._running if one.expected_s]
                if not running:
                    self._ticking = False
                    return
            self.say(remaining([(one.message, time.monotonic() - one.begun_s, one.expected_s) for one in running]))


def remaining(steps: list[tuple[str, float, float]]) -> str:
    """Return one line for steps of (message, seconds so far, seconds expected)."""
    parts = [f"{message}: {so_far:.0f} of about {expected:.0f} s" for message, so_far, expected in steps]
    left = max(expected - so_far for _, so_far, expected in steps)
    return "; ".join(parts) + (f"; about {_minutes(left)} left" if left > 5 else "; longer than usual")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
