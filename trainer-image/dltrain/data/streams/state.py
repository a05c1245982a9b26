"""Represent the state of a user's stream (``state_dict()``) as JSON, with its tensors, arrays and bytes as text."""

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dltrain.protocol import state_json
from dltrain.protocol.errors import MisuseError

_TENSOR, _ARRAY, _BYTES = "tensor", "array", "bytes"


def encode(value: Any) -> Any:
    """Return ``value`` as JSON types, which share no memory with it.

    Raise MisuseError for a type that is not supported.
    """
    return state_json.encode(value, (), _leaf, _unfit)


def decode(value: Any) -> Any:
    """Return the original value for ``value``, a result of ``encode``."""
    return state_json.decode(value, {_TENSOR: _tensor, _ARRAY: _array, _BYTES: base64.b64decode})


def _leaf(value: Any, path: state_json.Path) -> dict[str, Any] | None:
    if isinstance(value, Tensor):
        plain = value.detach().to("cpu").contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), _text(content)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_ARRAY: [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    return {_BYTES: _text(value)} if isinstance(value, bytes) else None


def _tensor(content: list[Any]) -> Tensor:
    dtype, shape, text = content
    if not text:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


def _array(content: list[Any]) -> Any:
    dtype, shape, text = content
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape).copy()


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _unfit(path: state_json.Path, found: str) -> MisuseError:
    where = "".join(f"[{part!r}]" for part in path)
    return MisuseError(
        f"dataset: found {found} in its state_dict(){where}; expected tensors, arrays, numbers, strings, bytes, and "
        "lists, tuples and dictionaries of them, which a checkpoint can contain"
    )
