"""Unpacking of tar and zip archives. The content decides about the format, because URLs often have no file name."""

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dltrain.protocol.errors import BadInputError
from dltrain.source.files import READ_NBYTES, Files

_FORMATS = "a tar archive (also .tar.gz, .tar.bz2 or .tar.xz) or a zip archive"
_XZ_MEMORY_NBYTES = 2**27
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, NotImplementedError)


def unpack(archive: Path, files: Files) -> None:
    """Write the entries of an archive to ``files``, and finish them.

    Raise BadInputError if the file is no such archive, or if an entry is not acceptable: a path or a link that leaves
    the folder, a device, a hard link, an encrypted file, too many bytes or too many entries.
    """
    with _damage(files), archive.open("rb") as file:
        start = file.read(6)
        file.seek(0)
        if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            _unzip(file, files)
        else:
            _untar(_decompressed(start, file), files)
    if not any(files.root.iterdir()):
        raise files.refusal("an archive without files", _FORMATS, "correct the archive")
    files.finish()


@contextmanager
def _damage(files: Files) -> Iterator[None]:
    """Raise BadInputError for the errors that damaged archives cause."""
    try:
        yield
    except BadInputError:
        raise
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the archive
        found = f"a file that cannot be unpacked ({type(error).__name__}: {str(error)[:200]})"
        raise files.refusal(found, _FORMATS, "correct the archive, or its URI") from error


class _Forward(io.RawIOBase):
    """The decompressed bytes of an archive, for ``tarfile``, which seeks forwards only.

    Their number is limited, and so is a single read, because ``tarfile`` reads a header into memory at once.
    """

    def __init__(self, inner: Any, max_nbytes: int) -> None:
        self._inner, self._max_nbytes, self._at = inner, max_nbytes, 0
        self.last = b""
        """The bytes of the last read."""

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET or to < self._at:
            raise tarfile.ReadError("entries that are not in order")
        while self._at < to and self.read(min(to - self._at, READ_NBYTES)):
            pass
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= READ_NBYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data: bytes = self._inner.read(size)
        self.last = data
        self._at += len(data)
        if self._at > self._max_nbytes:
            raise tarfile.ReadError("too many bytes beside the files")
        return data


def _decompressed(start: bytes, file: IO[bytes]) -> Any:
    if start[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file)
    if start[:3] == b"BZh":
        return bz2.BZ2File(file)
    if start == b"\xfd7zXZ\0":
        return _Xz(file)
    return file


class _Xz(io.RawIOBase):
    """``lzma.LZMAFile`` with a limit of memory, without seeking."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begin(b"")

    def _begin(self, start: bytes) -> None:
        self._xz = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_NBYTES)
        self._start = start
        """The first bytes of the stream, which have been read already."""

    def read(self, size: int = -1, /) -> bytes:
        found = b""
        while len(found) < size:
            if self._xz.eof and not self._next_stream():
                break
            data, self._start = self._start, b""
            if self._xz.needs_input and not data and not (data := self._file.read(READ_NBYTES)):
                raise EOFError("the archive ends too early")
            found += self._xz.decompress(data, size - len(found))
        return found

    def _next_stream(self) -> bool:
        """Begin the next one of several joined streams, after zeros or not. Return False if none follows."""
        rest = self._xz.unused_data.lstrip(b"\0")
        while not rest:
            if not (data := self._file.read(READ_NBYTES)):
                return False
            rest = data.lstrip(b"\0")
        self._begin(rest)
        return True


def _untar(stream: Any, files: Files) -> None:
    # Headers and padding of the largest number of entries, with room for long names.
    limited: Any = _Forward(stream, files.max_nbytes + 4096 * files.max_entries)
    with tarfile.open(fileobj=limited, mode="r:") as archive:
        while (member := archive.next()) is not None:
            if member.isdir():
                files.folder(member.name)
            elif member.issym():
                files.link(member.name, member.linkname)
            elif member.isfile():
                content = archive.extractfile(member)
                assert content is not None, "a file has a content"
                files.file(member.name, _pieces(content), executable=bool(member.mode & stat.S_IXUSR))
            else:
                kind = "a hard link" if member.islnk() else "a device or another special file"
                raise _kind(files, member.name, kind)
        # ``tarfile`` ends without an error at a damaged or incomplete header, as at the zeros after the last entry.
        if len(limited.last) < tarfile.BLOCKSIZE or any(limited.last):
            raise tarfile.ReadError(f"a damaged or incomplete header after {limited.tell()} bytes")
    while limited.read(READ_NBYTES):
        pass  # At its end, a compressed file has a checksum.


def _unzip(file: IO[bytes], files: Files) -> None:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            mode = member.external_attr >> 16
            kind = stat.S_IFMT(mode)
            if member.flag_bits & 0x1:
                raise _kind(files, member.filename, "an encrypted file")
            if member.is_dir():
                files.folder(member.filename)
            elif kind == stat.S_IFLNK:
                with archive.open(member) as content:
                    files.link(member.filename, content.read(4096).decode())
            elif kind in (0, stat.S_IFREG):
                with archive.open(member) as content:
                    files.file(member.filename, _pieces(content), executable=bool(mode & stat.S_IXUSR))
            else:
                raise _kind(files, member.filename, "a device or another special file")


def _kind(files: Files, name: str, kind: str) -> BadInputError:
    expected = "files, folders and symbolic links"
    return files.refusal(f"the entry {name[:200]!r}, {kind}", expected, "pack the archive without it")


def _pieces(content: IO[bytes]) -> Iterator[bytes]:
    while data := content.read(READ_NBYTES):
        yield data
