"""The places of arrays in a file of which only some blocks are present: ``.npy``, ``.bin``, uncompressed ``.npz``."""

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dltrain.data.files import FIELD
from dltrain.data.sharded.partial_file import PartialFile
from dltrain.protocol.errors import BadInputError

_LOCAL_HEADER = struct.Struct("<26xHH")
"""The lengths of name and extra field, at the end of the header of a zip file's member."""


@dataclass(frozen=True)
class Placed:
    """An array in a file: its element type and shape, and the byte at which its elements begin, in C order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def row_nbytes(self) -> int:
        """Return the size in bytes of one element of the first axis."""
        return int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.row_nbytes * self.shape[0] if self.shape else self.dtype.itemsize

    def whole(self, file: PartialFile) -> NDArray[np.generic]:
        """Fetch and return the whole array."""
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        data = file.read(self.offset, self.offset + self.nbytes)
        return np.frombuffer(data, self.dtype).reshape(self.shape)

    def mapped(self, file: PartialFile) -> NDArray[np.generic]:
        """Return the array, memory-mapped from the local copy of the file. Elements that were not fetched read as 0."""
        found: NDArray[np.generic] = np.memmap(file.path, self.dtype, "r", self.offset, self.shape)
        return found


def of_tokens(file: PartialFile) -> Placed:
    """Return the place of the array in a ``.npy`` or ``.bin`` file of tokens. Raise BadInputError if it is invalid."""
    name = file.shown.rpartition("/")[2]
    if name.endswith(".npy"):
        return _checked(file, _of_npy(_Reader(file), file.shown))
    dtype = np.dtype("<u4") if name.endswith(".uint32.bin") else np.dtype("<u2")
    return Placed(dtype, (file.nbytes // dtype.itemsize,), 0)


def of_arrays(file: PartialFile) -> dict[str, Placed]:
    """Return name → place of the arrays in an ``.npz`` file. Raise BadInputError if they are compressed or invalid."""
    found: dict[str, Placed] = {}
    try:
        with zipfile.ZipFile(io.BufferedReader(_Reader(file), 2**12)) as members:
            infos = members.infolist()
    except zipfile.BadZipFile as error:
        raise BadInputError(FIELD, f"{file.shown}: {error}", "an .npz file", "save it with numpy.savez") from None
    reader = _Reader(file)
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED:
            raise BadInputError(
                FIELD, f"{file.shown} with the compressed array {info.filename}",
                "arrays that are not compressed, because only those can be read in part (distribution Sharded)",
                "save the file with numpy.savez instead of numpy.savez_compressed, or use distribution Full",
            )  # fmt: skip
        reader.seek(info.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(reader.read(_LOCAL_HEADER.size))
        reader.seek(info.header_offset + _LOCAL_HEADER.size + name_length + extra_length)
        found[info.filename.removesuffix(".npy")] = _checked(file, _of_npy(reader, f"{info.filename} in {file.shown}"))
    return found


class _Reader(io.RawIOBase):
    """Read a partial file in any order. The blocks that are read are fetched first."""

    def __init__(self, file: PartialFile) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.nbytes}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._file.nbytes, self._at + len(buffer))
        if end <= self._at:
            return 0
        data = self._file.read(self._at, end)
        buffer[: len(data)] = data
        self._at = end
        return len(data)


def _of_npy(reader: _Reader, shown: str) -> Placed:
    try:
        version = np.lib.format.read_magic(reader)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(reader)
    except ValueError as error:
        raise BadInputError(FIELD, f"{shown}: {error}", "an array of numpy", "save it with numpy") from None
    if dtype.hasobject or (fortran_order and len(shape) > 1):
        found = f"{shown} with {dtype} in {'Fortran' if fortran_order else 'C'} order"
        raise BadInputError(FIELD, found, "numbers in C order", "save it from numpy.ascontiguousarray(array)")
    return Placed(dtype, shape, reader.tell())


def _checked(file: PartialFile, placed: Placed) -> Placed:
    """Raise BadInputError if the file ends before the array does. Return the array's place otherwise."""
    if placed.offset + placed.nbytes > file.nbytes:
        expected = f"at least {placed.offset + placed.nbytes}, as it says itself"
        raise BadInputError(FIELD, f"{file.shown} of {file.nbytes} bytes", expected, "put the whole file there")
    return placed
