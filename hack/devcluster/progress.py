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
    """Printer of progress lines, which several threads may use at the same time. With `quiet`, it prints nothing.

    While steps with an expected duration run, a line every 15 s shows how long each of them has run, and the time
    that is left until the last of them ends.
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
        """Print `message` when the context begins, and print the message with the duration of the step when it ends.

        `expected_s`: usual duration of the step on two cores, in seconds. Callers should pass it for steps that take
        minutes. 0 means that it is unknown.
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
    """Return one line that shows how far the running steps are, and the time until the last of them ends.

    `steps`: (message, seconds since its start, expected seconds) of each step.
    """
    parts = [f"{message}: {so_far:.0f} of about {expected:.0f} s" for message, so_far, expected in steps]
    left = max(expected - so_far for _, so_far, expected in steps)
    return "; ".join(parts) + (f"; about {_minutes(left)} left" if left > 5 else "; longer than usual")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
