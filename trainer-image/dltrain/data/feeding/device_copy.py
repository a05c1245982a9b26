"""A batch to the rank's device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class DeviceCopier:
    """On a GPU from pinned memory, so that neither the rank nor what the GPU computes waits for the copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._gpu else None  # type: ignore[no-untyped-call]

    def now(self, batch: Any) -> Any:
        """For what is computed next."""
        return _mapped(batch, self._moved)

    def ahead(self, batch: Any) -> Any:
        """In another thread, beside what is being computed; ``arrived`` before it is used."""
        if self._stream is None:
            return self.now(batch)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            tensors = _mapped(batch, lambda part: self._moved(part) if isinstance(part, Tensor) else part)
            return _Arriving(tensors, self._stream.record_event())

    def arrived(self, batch: Any) -> Any:
        """What ``ahead`` returned, as a batch: what the GPU is given next waits for it."""
        if not isinstance(batch, _Arriving):
            return batch
        current = torch.cuda.current_stream(self._device)
        current.wait_event(batch.event)

        def used(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return self._moved(part)  # only now: what memory it takes on the other stream nobody could know
            part.record_stream(current)  # its memory must not go to another batch on the other stream before
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
    """The batch with every leaf of its dicts, lists and tuples replaced; plain tuples become lists."""
    if callable(getattr(batch, "to", None)):  # a PackedSequence too, which is a tuple, parts of which stay on the CPU
        return function(batch)
    if isinstance(batch, dict):
        return {key: _mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [_mapped(value, function) for value in batch]
    return function(batch)
