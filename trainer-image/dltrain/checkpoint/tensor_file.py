"""Write tensors to a safetensors file directly from their memory.

The ``save`` function of the safetensors library first copies all bytes into one object. The copy doubles the memory and
blocks the GIL, so that training pauses during a background write. This module hashes and writes the tensors in pieces,
and releases the GIL for both.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PIECE_NBYTES = 4 * 2**20
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The name of each torch dtype in the safetensors format."""


@dataclass(frozen=True)
class Written:
    nbytes: int
    sha256: str


def write(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write ``tensors`` by name to the file ``path`` durably. The tensors must be contiguous and in main memory.

    Raise OSError, and ValueError for a dtype that the format does not support.
    """
    digest, nbytes = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(tensors):
            digest.update(piece)
            rest = memoryview(piece)
            nbytes += len(rest)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return Written(nbytes, digest.hexdigest())


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the file's header, then the tensors' bytes, sorted by decreasing element size so that all are aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in NAMES:
            raise ValueError(
                f"checkpoint: found tensor {name} of {tensor.dtype}; expected one of {list(NAMES)}. Convert the "
                "tensor to one of these dtypes"
            )
        header[name] = {
            "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes],
        }  # fmt: skip
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        content = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(content), PIECE_NBYTES):
            yield content[begin : begin + PIECE_NBYTES]
