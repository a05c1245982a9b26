"""The parts of a sharded checkpoint: which file holds which rows of which tensor.

Ranks divide a tensor along its first dimension. A part is a safetensors file with the rows of one rank, and the
checkpoint's manifest has the table of all parts. Together, the chunks of a tensor must have all of its rows, otherwise
the checkpoint counts as damaged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.tensor_file import NAMES, TensorFile, Written

_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def part_name(file: str, rank: int) -> str:
    """Return the name of the part of ``rank`` of the file ``file``, such as model-part-00003.safetensors."""
    stem, _, ending = file.partition(".")
    return f"{stem}-part-{rank:05d}.{ending}"


def row_count(shape: Iterable[int]) -> int:
    """Return the number of rows of a tensor: the size of its first dimension, 1 without dimensions."""
    return next(iter(shape), 1)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a tensor, from row ``begin`` on, in the file ``file``."""

    file: str
    begin: int
    rows: int


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of a sharded checkpoint, with its chunks in the order of their rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def parse(cls, value: Any) -> "ShardedTensor":
        """Return the tensor that ``as_json`` has written. Raise KeyError, ValueError or TypeError for other values."""
        dtype, shape, chunks = value
        return cls(_DTYPES[dtype], tuple(map(int, shape)), tuple(Chunk(str(f), int(b), int(r)) for f, b, r in chunks))

    def as_json(self) -> list[Any]:
        return [NAMES[self.dtype], list(self.shape), [[chunk.file, chunk.begin, chunk.rows] for chunk in self.chunks]]

    def gap(self) -> str | None:
        """Return which rows no chunk or two chunks have, or None if every row is in one chunk."""
        row = 0
        for chunk in self.chunks:
            if chunk.begin != row:
                return f"{'no' if chunk.begin > row else 'two'} parts with row {min(row, chunk.begin)}"
            row += chunk.rows
        rows = row_count(self.shape)
        return None if row == rows else f"parts with {row} of {rows} rows"


Table = Mapping[str, Mapping[str, ShardedTensor]]
"""The tensors of a sharded checkpoint by the file that holds them in other checkpoints, and by name."""


def to_json(table: Table) -> dict[str, Any]:
    return {file: {name: tensor.as_json() for name, tensor in tensors.items()} for file, tensors in table.items()}


def parse(value: Mapping[str, Any]) -> dict[str, dict[str, ShardedTensor]]:
    """Return the table of a manifest. Raise TypeError if it is invalid, or if the parts lack rows of a tensor."""
    try:
        table = {f: {name: ShardedTensor.parse(row) for name, row in rows.items()} for f, rows in value.items()}
        check(table)
    except (LookupError, AttributeError, ValueError) as error:
        raise TypeError(f"parts: {error}") from None
    return table


def check(table: Table) -> None:
    """Raise ValueError if the parts of a tensor do not have each row once."""
    for tensors in table.values():
        for name, tensor in tensors.items():
            if (gap := tensor.gap()) is not None:
                raise ValueError(f"tensor {name}: found {gap}; expected each of its rows in one part")


class PartsFile:
    """The tensors of the parts of one file, read as whole tensors, one at a time, as from a ``TensorFile``.

    ``entries``: name → (dtype, shape) of each tensor. This class does not check the content, so the caller must verify
    the hashes of the parts before. Raise OSError if a part cannot be read.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, ShardedTensor]) -> None:
        self.folder, self.tensors = folder, tensors
        self.entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        self._files: dict[str, TensorFile] = {}

    def read(self, name: str) -> Tensor:
        """Return a tensor in new main memory. Raise OSError if it cannot be read, even after retries."""
        tensor = self.tensors[name]
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for chunk in tensor.chunks if whole.numel() else ():
            rows = whole.narrow(0, chunk.begin, chunk.rows) if whole.dim() else whole
            self.read_rows(rows, chunk.file, name)
        return whole

    def read_rows(self, target: Tensor, file: str, name: str, first: int = 0) -> None:
        """Read rows of a tensor from the part ``file`` into ``target``, which is contiguous and in main memory.

        ``first``: the first of the rows, counted from the first row of the part. Raise OSError.
        """
        if (found := self._files.get(file)) is None:
            found = self._files[file] = TensorFile(self.folder / file)
        found.read_rows(target, name, first)


def export(path: Path, parts: PartsFile) -> Written:
    """Write the whole tensors of ``parts`` durably to one safetensors file, with one tensor in memory at a time.

    Raise OSError.
    """
    return tensor_file.write_pieces(path, tensor_file.streamed(parts.entries, parts.read))
