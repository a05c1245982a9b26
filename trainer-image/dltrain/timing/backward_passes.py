"""How long the backward passes of a step take.

A pass begins at the loss, if it was told (``t.log``), else when it has reached a first parameter, the last one in use;
it ends when autograd's engine does. Steps with several passes (a batch in parts) have the sum. On a GPU the times are
its stream's, read once the step has waited for it.
"""

import time
from typing import Any

import torch

Moment = Any
"""Seconds of a clock, or an event in a GPU's stream."""


class Passes:
    """Of one step after the other."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._done: list[tuple[Moment, Moment]] = []
        self._began: Moment | None = None

    def start(self) -> None:
        """Backward is at work; it may have been for a while."""
        if self._began is None:
            self._began = self._now()

    def end(self) -> None:
        """A pass, or one within another, has ended."""
        if self._began is not None:
            self._done.append((self._began, self._now()))
            self._began = None

    @property
    def seconds(self) -> float:
        """Of all passes of the step; on a GPU after it was waited for."""
        if self._gpu:
            return sum(float(began.elapsed_time(ended)) for began, ended in self._done if ended.query()) / 1e3
        return float(sum(ended - began for began, ended in self._done))

    def _now(self) -> Moment:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
