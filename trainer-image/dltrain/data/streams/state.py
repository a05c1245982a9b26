"""Represent the state of a user's stream (``state_dict()``) as JSON, so that reading a checkpoint executes no code."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dltrain.protocol.errors import MisuseError

_PLAIN = (str, int, float, bool, type(None))
_TENSOR, _ARRAY, _BYTES, _TUPLE, _DICT = "tensor", "array", "bytes", "tuple", "dict"


def encode(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return ``value`` as JSON types, which share no memory with it.

    ``path``: the keys that lead to ``value``, for the error. Raise MisuseError for a type that is not supported.
    """
    if isinstance(value, Tensor):
        plain = value.detach().to("cpu").contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), _text(content)]}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_ARRAY: [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    if isinstance(value, bytes):
        return {_BYTES: _text(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, _PLAIN) for key in value):
        return {_DICT: [[key, encode(part, (*path, key))] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        parts = [encode(part, (*path, index)) for index, part in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    where = "".join(f"[{part!r}]" for part in path)
    raise MisuseError(
        f"dataset: found {type(value).__name__} in its state_dict(){where}; expected tensors, arrays, numbers, "
        "strings, bytes, and lists, tuples and dictionaries of them, which a checkpoint can contain"
    )


def decode(value: Any) -> Any:
    """Return the original value for ``value``, a result of ``encode``."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        dtype, shape, text = content
        if not text:
            return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        flat = torch.frombuffer(bytearray(_content(text)), dtype=torch.uint8)
        return flat.view(getattr(torch, dtype)).reshape(shape)
    if kind == _ARRAY:
        dtype, shape, text = content
        return np.frombuffer(_content(text), np.dtype(dtype)).reshape(shape).copy()
    if kind == _BYTES:
        return _content(content)
    if kind == _TUPLE:
        return tuple(decode(part) for part in content)
    return {key: decode(part) for key, part in content}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _content(text: str) -> bytes:
    return base64.b64decode(text)
