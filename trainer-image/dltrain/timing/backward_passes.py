"""Measure the duration of the backward passes of a step.

A backward pass starts at the loss, if the script passed the loss to ``t.log``. Otherwise it starts when the first
parameter gets its gradient, which is the parameter that the forward pass used last. A backward pass ends when the
autograd engine ends. With gradient accumulation, the durations of all passes are added. On a GPU, events in the stream
measure the time. The events are read after the step has waited for the stream.
"""

import time
from typing import Any

import torch

Moment = Any
"""A point in time: on a CPU, the value of ``time.perf_counter`` in seconds; on a GPU, an event in its stream."""


class Passes:
    """Measure the backward passes of one step after another."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """Begin a step. Discard the passes of the previous step."""
        self._done: list[tuple[Moment, Moment]] = []
        self._began: Moment | None = None

    def start(self) -> None:
        """Record the start of a backward pass, unless it is already recorded."""
        if self._began is None:
            self._began = self._now()

    def end(self) -> None:
        """Record the end of a backward pass.

        Do nothing if no start is recorded, as after a pass inside another pass.
        """
        if self._began is not None:
            self._done.append((self._began, self._now()))
            self._began = None

    @property
    def seconds(self) -> float:
        """Total duration of the step's backward passes in seconds; 0 without one.

        On a GPU, the caller must first wait for the stream. Passes that the GPU has not finished yet are not included.
        """
        if self._gpu:
            return sum(float(began.elapsed_time(ended)) for began, ended in self._done if ended.query()) / 1e3
        return float(sum(ended - began for began, ended in self._done))

    def _now(self) -> Moment:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
