"""Write tensors to a safetensors file directly from their memory, and read them one at a time.

The ``save`` function of the safetensors library first copies all bytes into one object. The copy doubles the memory and
blocks the GIL, so that training pauses during a background write. This module hashes and writes the tensors in pieces,
and releases the GIL for both.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlcontract.checkpoint.parts import header, stored_entries
from dltrain.host.volume_access import retry

T = TypeVar("T")

PIECE_NBYTES = 4 * 2**20
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex128: "C128",
}  # fmt: skip
"""The name of each torch dtype in the safetensors format. The format lacks complex128: see ``parts.REAL_VIEWS``."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Written:
    nbytes: int
    sha256: str


def write(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write ``tensors`` (name → tensor) durably to the file ``path``.

    The tensors must be contiguous and in main memory. Raise OSError, and ValueError for a dtype that the format does
    not support.
    """
    return write_pieces(path, pieces(tensors))


def write_pieces(path: Path, content: Iterable[bytes | memoryview]) -> Written:
    """Write the pieces of a file durably to ``path``. Raise OSError."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in content:
            digest.update(piece)
            rest = memoryview(piece)
            nbytes += len(rest)
            while rest:
                rest = rest[file.write(rest) :]
            del piece, rest  # ``content`` may read the next tensor now, and these would keep the memory of this one
        os.fsync(file.fileno())
    return Written(nbytes, digest.hexdigest())


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex digits. Read ``PIECE_NBYTES`` bytes at a time. Raise OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_NBYTES):
            digest.update(piece)
    return digest.hexdigest()


class TensorFile:
    """A safetensors file whose tensors are read one at a time. Raise OSError if it cannot be read, even after retries.

    ``entries``: name → (dtype, shape) of each tensor. This class does not check the content, so the caller must verify
    the file's hash before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = json.loads(self._repeat(self._header))
        self.entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            name: (DTYPES[dtype], shape) for name, (dtype, shape) in stored_entries(header).items()
        }
        self._offsets = {name: self._begin + header[name]["data_offsets"][0] for name in self.entries}

    def _header(self) -> bytes:
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._begin = 8 + length
            return file.read(length)

    def read(self, name: str) -> Tensor:
        """Return a tensor in new main memory. Raise OSError if the tensor cannot be read, even after retries."""
        dtype, shape = self.entries[name]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self.read_rows(tensor, name)
        return tensor

    def read_rows(self, target: Tensor, name: str, first: int = 0) -> None:
        """Read rows of a tensor into ``target``, from row ``first`` on. ``target`` is contiguous and in main memory.

        Raise OSError if they cannot be read, even after retries, or if ``target`` does not fit the tensor.
        """
        dtype, shape = self.entries.get(name, (None, ()))
        rows = target.shape[0] if target.dim() else 1
        if target.dtype != dtype or target.shape[1:] != shape[1:] or first + rows > next(iter(shape), 1):
            raise OSError(
                f"{self.path}: found {'no tensor' if dtype is None else f'{dtype} {tuple(shape)}'} {name}; expected "
                f"{target.dtype} {tuple(target.shape)} from row {first} on. The checkpoint is damaged"
            )
        if target.numel():
            self._repeat(lambda: self._fill(target, self._offsets[name] + first * target.nbytes // rows))

    def _repeat(self, operation: Callable[[], T]) -> T:
        return retry(operation, str(self.path))

    def _fill(self, tensor: Tensor, offset: int) -> None:
        rest = content(tensor).data
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            while rest:
                count = file.readinto(rest[:PIECE_NBYTES])
                if not count:
                    raise OSError(f"{self.path}: found the end of the file within a tensor; expected its whole content")
                rest = rest[count:]


def content(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor in main memory, as an array that shares the tensor's memory."""
    return cast(NDArray[np.uint8], tensor.detach().reshape(-1).view(torch.uint8).numpy())


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file with ``tensors``, at most ``PIECE_NBYTES`` bytes of a tensor at a time.

    The tensors must be contiguous and in main memory. Raise ValueError for a dtype that the format does not support.
    """
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return streamed(entries, tensors.__getitem__)


def streamed(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensor: Callable[[str], Tensor]
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file, at most ``PIECE_NBYTES`` bytes of a tensor at a time.

    ``entries``: name → (dtype, shape) of each tensor. ``tensor``: a function that returns a tensor, contiguous and in
    main memory. It is called for one tensor after another.

    The file's header comes first, then the tensors' bytes, sorted by decreasing element size so that all are aligned.
    Raise ValueError for a dtype that the format does not support.
    """
    for name, (dtype, _) in entries.items():
        if dtype not in NAMES:
            raise ValueError(
                f"checkpoint: found tensor {name} of {dtype}; expected one of {list(NAMES)}. Convert the "
                "tensor to one of these dtypes"
            )
    order, first = header({name: (NAMES[dtype], shape) for name, (dtype, shape) in entries.items()})
    yield first
    for name in order:
        data = tensor(name).reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), PIECE_NBYTES):
            yield data[begin : begin + PIECE_NBYTES]
        del data  # before the next tensor is read
