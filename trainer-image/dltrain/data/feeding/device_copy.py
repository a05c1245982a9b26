"""Copying of batches to the rank's device."""

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor


class DeviceCopier:
    """Copy batches to a device. For a GPU, use pinned memory, so that neither the rank nor the GPU waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._gpu else None  # type: ignore[no-untyped-call]

    def now(self, batch: Any) -> Any:
        """Return a copy of a batch on the device, for immediate use."""
        return _mapped(batch, self._moved)

    def ahead(self, batch: Any) -> Any:
        """Start to copy a batch while the GPU computes. Call ``arrived`` before using the result.

        This method may be called in another thread than the training.
        """
        if self._stream is None:
            return self.now(batch)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            tensors = _mapped(batch, lambda part: self._moved(part) if isinstance(part, Tensor) else part)
            return _Arriving(tensors, self._stream.record_event())

    def arrived(self, batch: Any) -> Any:
        """Return the copied batch. ``batch``: a result of ``ahead``.

        This method does not wait. Work that the current GPU stream gets from now on waits for the copy.
        """
        if not isinstance(batch, _Arriving):
            return batch
        current = torch.cuda.current_stream(self._device)
        current.wait_event(batch.event)

        def used(part: Any) -> Any:
            if not isinstance(part, Tensor):
                # Other objects are copied only now, because ``record_stream`` cannot protect their memory.
                return self._moved(part)
            part.record_stream(current)  # otherwise the next copy could reuse the memory too early
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
    """Return a batch in which ``function`` was applied to every item of nested mappings and sequences.

    An object with a method ``to``, such as a tensor, counts as an item. A container whose items all stay the same is
    returned itself. Otherwise the result has a new container of the same type.
    """
    if callable(getattr(batch, "to", None)):  # for example a PackedSequence, which is a tuple
        return function(batch)
    if isinstance(batch, Mapping):
        keys, values = list(batch), list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes | bytearray | memoryview | range):
        keys, values = list(range(len(batch))), list(batch)
    else:
        return function(batch)
    mapped = [_mapped(value, function) for value in values]
    if all(new is old for new, old in zip(mapped, values, strict=True)):
        return batch
    return _like(batch, dict(zip(keys, mapped, strict=True)))


def _like(container: Any, items: dict[Any, Any]) -> Any:
    """Return a container of the same type with other items. ``items``: key or index → item.

    If the type's constructor needs other arguments, return a dict or list, as torch does when it pins memory.
    """
    if isinstance(container, MutableMapping | MutableSequence):  # a copy keeps attributes that a subclass has added
        new = copy.copy(container)
        for key, item in items.items():
            new[key] = item
        return new
    given = items if isinstance(container, Mapping) else list(items.values())
    make = getattr(container, "_make", type(container))  # that of a named tuple, or else the constructor
    try:
        return make(given)
    except TypeError:
        return given
