"""Copying of batches to the rank's device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class DeviceCopier:
    """Copy batches to a device. For a GPU it uses pinned memory, so that neither rank nor GPU waits for the copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._gpu else None  # type: ignore[no-untyped-call]

    def now(self, batch: Any) -> Any:
        """Copy a batch for immediate use."""
        return _mapped(batch, self._moved)

    def ahead(self, batch: Any) -> Any:
        """Copy a batch from another thread, in parallel with computing. Call ``arrived`` before using the result."""
        if self._stream is None:
            return self.now(batch)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            tensors = _mapped(batch, lambda part: self._moved(part) if isinstance(part, Tensor) else part)
            return _Arriving(tensors, self._stream.record_event())

    def arrived(self, batch: Any) -> Any:
        """Return the batch of an ``ahead`` result. Later work on the current GPU stream waits for the copy."""
        if not isinstance(batch, _Arriving):
            return batch
        current = torch.cuda.current_stream(self._device)
        current.wait_event(batch.event)

        def used(part: Any) -> Any:
            if not isinstance(part, Tensor):
                # Objects with a method ``to`` are copied only now, because their memory cannot be recorded on a stream.
                return self._moved(part)
            part.record_stream(current)  # otherwise a batch on the copy stream could reuse the memory too early
            return part

        return _mapped(batch.batch, used)

    def _moved(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            pinned = part.pin_memory() if self._gpu and part.device.type == "cpu" and part.numel() else part
            return pinned.to(self._device, non_blocking=True)
        return part.to(self._device) if callable(getattr(part, "to", None)) else part


class _Arriving:
    def __init__(self, batch: Any, event: torch.cuda.Event) -> None:
        self.batch, self.event = batch, event


def _mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every leaf of the batch's dicts, lists and tuples. Plain tuples become lists."""
    if callable(getattr(batch, "to", None)):  # also a PackedSequence, a tuple that keeps some parts on the CPU
        return function(batch)
    if isinstance(batch, dict):
        return {key: _mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [_mapped(value, function) for value in batch]
    return function(batch)
