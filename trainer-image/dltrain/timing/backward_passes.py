"""Measure the duration of the backward passes of a step.

A pass starts at the loss, if the script called ``t.log``. Otherwise it starts at the first parameter that gets its
gradient. The forward pass used this parameter last. A pass ends when the autograd engine ends. With gradient
accumulation, the durations of all passes are added. On a GPU, events in the stream measure the time. They are read
after the step has waited for the stream.
"""

import time
from typing import Any

import torch

Moment = Any
"""Seconds of a clock, or an event in a GPU stream."""


class Passes:
    """Measure the backward passes of one step after another."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._done: list[tuple[Moment, Moment]] = []
        self._began: Moment | None = None

    def start(self) -> None:
        """Record the start of a backward pass, unless it is already recorded."""
        if self._began is None:
            self._began = self._now()

    def end(self) -> None:
        """Record the end of a pass, which may be nested in another."""
        if self._began is not None:
            self._done.append((self._began, self._now()))
            self._began = None

    @property
    def seconds(self) -> float:
        """Total duration of the step's passes. On a GPU, wait for the stream before reading it."""
        if self._gpu:
            return sum(float(began.elapsed_time(ended)) for began, ended in self._done if ended.query()) / 1e3
        return float(sum(ended - began for began, ended in self._done))

    def _now(self) -> Moment:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
