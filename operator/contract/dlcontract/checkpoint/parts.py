"""The parts of a sharded checkpoint: which file holds which rows of which tensor, and how the parts are joined.

Ranks divide a tensor along its first dimension. A part is a safetensors file with the rows of one rank, and the
checkpoint's manifest has the table of all parts. Together, the chunks of a tensor must have all of its rows, otherwise
the checkpoint counts as damaged. The bytes of the chunks, one after another, are those of the tensor.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

MODEL = "model.safetensors"
ELEMENT_NBYTES = {
    "C128": 16, "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4,
    "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element by the name of its type in the safetensors format, and of C128 (see ``REAL_VIEWS``)."""
REAL_VIEWS = {"C128": "F64"}
"""The real type that a file states in place of a complex type that the safetensors format lacks.

The tensor's shape in the file has a last dimension of 2 in addition: real and imaginary part. Other programs read this
real tensor. ``__metadata__`` has the complex type under ``COMPLEX_TYPES``."""
COMPLEX_TYPES = "dljob.complex_types"
"""Key in the ``__metadata__`` of a file: JSON of the complex type by the tensor's name."""
PIECE_NBYTES = 4 * 2**20
Entries = Mapping[str, tuple[str, tuple[int, ...]]]
"""(Type in the safetensors format, shape) of each tensor of a file by name."""


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
    """A tensor of a sharded checkpoint, with its chunks in the order of their rows.

    ``dtype``: name of its type in the safetensors format.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def parse(cls, value: Any) -> "ShardedTensor":
        """Return the tensor that ``as_json`` has written. Raise KeyError, ValueError or TypeError for other values."""
        dtype, shape, chunks = value
        if dtype not in ELEMENT_NBYTES:
            raise ValueError(f"found the type {dtype}; expected one of {', '.join(ELEMENT_NBYTES)}")
        found = [Chunk(str(file), int(begin), int(rows)) for file, begin, rows in chunks]
        return cls(dtype, tuple(map(int, shape)), tuple(sorted(found, key=lambda chunk: (chunk.begin, chunk.rows))))

    def as_json(self) -> list[Any]:
        return [self.dtype, list(self.shape), [[chunk.file, chunk.begin, chunk.rows] for chunk in self.chunks]]

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


def header(entries: Entries) -> tuple[list[str], bytes]:
    """Return (names in the order of the tensors' bytes, first bytes of the file) for a safetensors file.

    The tensors are sorted by decreasing element size, so that all are aligned.
    """
    order = sorted(entries, key=lambda name: (-ELEMENT_NBYTES[entries[name][0]], name))
    viewed = {name: entries[name][0] for name in order if entries[name][0] in REAL_VIEWS}
    found: dict[str, object] = {"__metadata__": {COMPLEX_TYPES: json.dumps(viewed)}} if viewed else {}
    at = 0
    for name in order:
        dtype, shape = entries[name]
        end = at + prod(shape) * ELEMENT_NBYTES[dtype]
        stated = (REAL_VIEWS[dtype], [*shape, 2]) if dtype in REAL_VIEWS else (dtype, list(shape))
        found[name] = {"dtype": stated[0], "shape": stated[1], "data_offsets": [at, end]}
        at = end
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text


def stored_entries(found: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (type, shape) of each tensor from the JSON of a file that ``header`` or another program began."""
    complex_types = json.loads(found.get("__metadata__", {}).get(COMPLEX_TYPES, "{}"))
    entries = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in found.items() if name != "__metadata__"}
    return entries | {name: (dtype, entries[name][1][:-1]) for name, dtype in complex_types.items()}


Read = Callable[[str, int, int], Iterator[bytes]]
"""Yield bytes of a part, given its file name, the offset of the first byte, and the number of bytes."""


def joined(folder: Path, tensors: Mapping[str, ShardedTensor]) -> Iterator[bytes]:
    """Yield the content of one safetensors file with whole tensors, at most ``PIECE_NBYTES`` bytes of them at a time.

    ``folder``: contains the parts, whose checksums the caller must verify before. Raise OSError if a part cannot be
    read, and ValueError if it does not have the rows that ``tensors`` states.
    """
    return joined_from(lambda file, offset, nbytes: _content(folder / file, offset, nbytes), tensors)


def joined_from(read: Read, tensors: Mapping[str, ShardedTensor]) -> Iterator[bytes]:
    """Yield the same content as ``joined``, from parts that ``read`` reads, in any place. Raise its errors, too."""
    order, begin = header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    files = sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks})
    places = {file: _places(file, read) for file in files}
    yield begin
    for name in order:
        tensor = tensors[name]
        row_nbytes = prod(tensor.shape[1:]) * ELEMENT_NBYTES[tensor.dtype]
        for chunk in tensor.chunks:
            if not (nbytes := chunk.rows * row_nbytes):
                continue
            offset, found = places[chunk.file].get(name, (0, 0))
            if found != nbytes:
                raise ValueError(f"{chunk.file}: found {found} bytes of {name}; expected {nbytes}")
            yield from read(chunk.file, offset, nbytes)


def _places(file: str, read: Read) -> dict[str, tuple[int, int]]:
    """Return (offset, number of bytes) of each tensor in a safetensors file. Raise ValueError if it is none."""
    length = int.from_bytes(b"".join(read(file, 0, 8)), "little")
    try:
        found = json.loads(b"".join(read(file, 8, length)))
        spans = {name: entry["data_offsets"] for name, entry in found.items() if name != "__metadata__"}
        return {name: (8 + length + begin, end - begin) for name, (begin, end) in spans.items()}
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{file}: found an invalid header ({error!r}); expected safetensors") from None


def _content(path: Path, offset: int, nbytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while nbytes:
            piece = file.read(min(nbytes, PIECE_NBYTES))
            if not piece:
                raise ValueError(f"{path.name}: found its end; expected {nbytes} bytes more")
            yield piece
            nbytes -= len(piece)
