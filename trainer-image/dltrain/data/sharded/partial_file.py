"""A copy of a remote file on the local disk that has only some of its blocks. The ranks of a pod share it.

The copy is a sparse file: what is not fetched takes no space. A second file, the index, has one byte per block, which
is 1 if the block is present. Both outlive the process, so ranks that restart in the same pod fetch no block again.

A rank may free blocks while another one reads them, and the freed ones read as zeros. Readers take no lock, because a
rank keeps the lock during a whole fetch. Instead, a third file counts how often blocks were freed: before it frees
blocks, a rank marks them as absent, and then raises the count. So a read is valid if its blocks were present, and the
count is the same before and after it.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dltrain.data.download import PATIENCE_S, WAITS_S, in_units, say
from dltrain.data.remote_sources import NoRangesError, Remote, Source, TransientError
from dltrain.data.sharded.block_sums import BLOCK_NBYTES, SUFFIX, BlockSums
from dltrain.protocol.errors import BadInputError, ShardError

URI, SHA256, SIZE = "spec.dataset.uri", "spec.dataset.sha256", "spec.dataset.size"
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
"""Flags of Linux' fallocate."""
_UNLOCKED_READS = 2
"""Number of attempts to read without the lock. A rank frees at most once before a fetch, so a third one rarely helps.
"""
Bytes = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ranges of bytes in a file: where each begins, and where it ends (exclusive)."""
Read = TypeVar("Read")


@dataclass(frozen=True)
class Wanted:
    """Blocks to fetch, and the blocks that must not be freed to make room for them."""

    blocks: NDArray[np.int64]
    name: Callable[[int, int], str]
    """Maps a byte range (begin, end) to a text for messages that names the data in it."""
    needed: NDArray[np.int64] | None = None
    """The blocks that ranks of this node need. Others may be freed; None: no block may be freed."""


class PartialFile:
    """The blocks of a remote file that are on this node."""

    def __init__(
        self,
        uri: str,
        folder: Path,
        *,
        sha256: str | None = None,
        room_nbytes: int | None = None,
        secret: Mapping[str, str] | None = None,
    ) -> None:
        """Find out the size and version of the file at ``uri``, and which of its blocks are in ``folder``.

        ``sha256``: expected checksum of ``FILE.blocks``, or None. ``room_nbytes``: maximum size of all blocks together.
        ``secret``: credentials; None: environment variables. Raise BadInputError if no retry can succeed, and OSError
        otherwise.
        """
        self._source = Source(uri, secret=secret)
        self.shown, self._room_nbytes = self._source.shown, room_nbytes
        self.alive: Callable[[], None] = lambda: None
        """Called whenever data has arrived, so that the agent does not take a long fetch for a hang."""
        self.fetched_nbytes = 0
        remote = _retried(self._source, self._source.describe)
        if remote.nbytes is None:
            found = f"{self.shown}, of which the server does not say the size"
            raise BadInputError(URI, found, "a server that supports ranged requests", "use another server")
        self.nbytes, self.version = remote.nbytes, remote.version
        self._sums = self._block_sums(sha256)
        self.block_nbytes = self._sums.block_nbytes if self._sums else BLOCK_NBYTES
        blocks = -(-self.nbytes // self.block_nbytes)
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = folder / "shards.data", folder / "shards.lock"
        with self._alone():
            self._prepare(folder, max(1, blocks), sha256)

    def blocks(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of all blocks that overlap the byte ranges from ``begin[i]`` to ``end[i]`` (exclusive).

        No range may be empty.
        """
        found = np.zeros(len(self.present) + 1, np.int64)
        np.add.at(found, begin // self.block_nbytes, 1)
        np.add.at(found, (end - 1) // self.block_nbytes + 1, -1)
        return np.flatnonzero(np.cumsum(found[:-1]))

    def has(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> bool:
        """Return True if all blocks of the byte ranges from ``begin[i]`` to ``end[i]`` (exclusive) are present."""
        first, last = begin // self.block_nbytes, (end - 1) // self.block_nbytes
        return bool(self.present[first].all() and self.present[last].all()) and (
            not (last - first > 1).any() or bool(self.present[self.blocks(begin, end)].all())
        )

    def ensure(self, wanted: Wanted) -> None:
        """Fetch those of the ``wanted`` blocks that are not present.

        Raise BadInputError if no retry can succeed, and ShardError otherwise.
        """
        if not self.present[wanted.blocks].all():
            with self._alone():
                self._fetch_missing(wanted)

    def reading(self, places: Bytes, read: Callable[[], Read], wanted: Callable[[], Wanted]) -> Read:
        """Return the result of ``read``, which copies the bytes at ``places`` from the file at ``path``.

        Blocks that are not present are fetched first. ``read`` is called again if another rank of the pod has freed
        blocks meanwhile. ``wanted``: returns the blocks to fetch, which contain the bytes at ``places``. Raise what
        ``ensure`` and ``read`` raise.
        """
        for _ in range(_UNLOCKED_READS):
            frees = int(self._frees[0])
            if not self.has(*places):
                break
            found = read()
            if int(self._frees[0]) == frees:
                return found
        with self._alone():  # no rank frees blocks now
            self._fetch_missing(wanted())
            return read()

    def read(self, begin: int, end: int) -> bytes:
        """Fetch and return the bytes from ``begin`` to ``end``, which belong to no shard, such as headers."""
        places = np.array([begin]), np.array([end])

        def read() -> bytes:
            with self.path.open("rb") as file:
                file.seek(begin)
                return file.read(end - begin)  # os.pread returns at most 2 GiB

        return self.reading(
            places, read, lambda: Wanted(self.blocks(*places), lambda *_: "the arrays that every node needs")
        )

    def _block_sums(self, sha256: str | None) -> BlockSums | None:
        source = Source(_beside(self._source.uri), secret=self._source.secret)
        try:
            content = _retried(source, lambda: b"".join(source.stream()))
        except BadInputError as error:
            if sha256 is None and "found nothing at" in str(error):
                return None
            raise
        if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
            remedy = f"with distribution Sharded, set the checksum that block_sums printed for this {SUFFIX} file"
            raise BadInputError(SHA256, f"checksum {found} of {source.shown}", sha256, remedy)
        sums = BlockSums.parse(content.decode(errors="replace"), URI, source.shown)
        if sums.nbytes != self.nbytes:
            raise BadInputError(
                URI, f"{self.shown} of {self.nbytes} bytes", f"{sums.nbytes} bytes, as {source.shown} says",
                "put the right file there, or make the checksums of its blocks again",
            )  # fmt: skip
        return sums

    def _prepare(self, folder: Path, blocks: int, sha256: str | None) -> None:
        """Use the blocks from before if they are of the same version; otherwise begin with an empty copy.

        ``blocks``: number of the blocks of the whole file. ``sha256``: expected checksum of ``FILE.blocks``, or None.
        """
        note, index, frees = (folder / name for name in ("shards.json", "shards.index", "shards.frees"))
        now = {"version": self.version, "nbytes": self.nbytes, "block_nbytes": self.block_nbytes, "sha256": sha256}
        try:
            before = json.loads(note.read_text())
        except (FileNotFoundError, ValueError):
            before = None
        begun = self.path.exists()
        same = begun and before == now and bool(self.version or sha256) and index.exists()
        if not same:
            note.unlink(missing_ok=True)
        for path, nbytes in ((self.path, self.nbytes), (index, blocks), (frees, 8)):
            with path.open("ab") as file:
                file.truncate(nbytes)  # does not empty the file, because other ranks of the pod may have mapped it
        self.present: NDArray[np.uint8] = np.memmap(index, np.uint8, "r+", shape=(blocks,))
        self._frees: NDArray[np.uint64] = np.memmap(frees, np.uint64, "r+", shape=(1,))
        if begun and not same:
            self._free(np.arange(blocks))
        if not same:
            note.write_text(json.dumps(now))

    def _fetch_missing(self, wanted: Wanted) -> None:
        """Fetch the blocks that are not present. The caller has the lock."""
        missing = wanted.blocks[self.present[wanted.blocks] == 0]
        if not len(missing):  # Another rank of the pod has fetched them.
            return
        self._make_room(missing, wanted.blocks, wanted.needed)
        for first, end in _runs(missing):
            self._fetch(first, end, wanted.name)

    def _make_room(
        self, missing: NDArray[np.int64], wanted: NDArray[np.int64], needed: NDArray[np.int64] | None
    ) -> None:
        """Free blocks that no rank of this node needs if there is no space for the missing ones."""
        if self._room_nbytes is None:
            return
        nbytes = (int(self.present.sum()) + len(missing)) * self.block_nbytes
        if nbytes <= self._room_nbytes:
            return
        free = self.present.copy()
        free[wanted] = 0
        if needed is not None:
            free[needed] = 0
            self._free(np.flatnonzero(free))
        nbytes = (int(self.present.sum()) + len(missing)) * self.block_nbytes
        if nbytes > self._room_nbytes:
            raise ShardError(
                f"{SIZE}: found {in_units(self._room_nbytes)} on this node; expected {in_units(nbytes)} for its shards "
                f"of {self.shown}. Raise {SIZE}, or use more nodes"
            )

    def _free(self, blocks: NDArray[np.int64]) -> None:
        """Remove blocks from the copy, and return their space to the disk. The caller has the lock."""
        self.present[blocks] = 0
        self._frees += np.uint64(1)  # before the data vanish; see the module's docstring
        libc = ctypes.CDLL(None, use_errno=True)
        with self.path.open("r+b") as file:
            for first, end in _runs(blocks):
                place = (ctypes.c_int64(each * self.block_nbytes) for each in (first, end - first))
                if not libc.fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, *place):
                    continue
                if (number := ctypes.get_errno()) != errno.EOPNOTSUPP:
                    raise OSError(number, os.strerror(number), str(self.path))

    def _fetch(self, first: int, end: int, name: Callable[[int, int], str]) -> None:
        """Fetch the blocks from ``first`` to ``end`` (exclusive). After a fault of the network, continue with the
        missing ones.
        """
        waits, since = iter(WAITS_S), time.monotonic()

        def named(error: Exception) -> str:
            begin = first * self.block_nbytes
            return f"{error}. It holds {name(begin, min(end * self.block_nbytes, self.nbytes))}"

        while first < end:
            try:
                self._same_version()
                for block, data in self._received(first, end):
                    self._store(block, data, name)
                    first, waits, since = block + 1, iter(WAITS_S), time.monotonic()
            except NoRangesError:
                found = f"{self.shown}, whose server supports no ranged requests"
                raise BadInputError(URI, found, "a server that supports them", "use distribution Full") from None
            except TransientError as error:
                wait_s = next(waits, None)
                if wait_s is None or time.monotonic() - since > PATIENCE_S:
                    raise ShardError(named(error)) from error
                say(f"{error}; retrying in {wait_s} s")
                time.sleep(wait_s)
                self._source.shrink_requests()
            except BadInputError as error:
                error.args = (named(error),)
                raise

    def _received(self, first: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (number, content) of the blocks from ``first`` to ``end``, in order."""
        waiting, block = bytearray(), first
        stop = min(end * self.block_nbytes, self.nbytes)
        for data in self._source.read(first * self.block_nbytes, stop):
            waiting += data
            self.alive()
            while block < end and len(waiting) >= (size := self._size(block)):
                yield block, bytes(waiting[:size])
                del waiting[:size]
                block += 1

    def _size(self, block: int) -> int:
        return int(min(self.block_nbytes, self.nbytes - block * self.block_nbytes))

    def _store(self, block: int, data: bytes, name: Callable[[int, int], str]) -> None:
        begin = block * self.block_nbytes
        if self._sums and (found := hashlib.sha256(data).hexdigest()) != self._sums.sums[block]:
            raise _CorruptError(
                URI, f"checksum {found} of bytes {begin} to {begin + len(data) - 1} of {self.shown}",
                f"{self._sums.sums[block]}, as {self.shown}{SUFFIX} says",
                "put the right file there, or make the checksums of its blocks again",
            )  # fmt: skip
        try:
            with self.path.open("r+b") as file:
                os.pwrite(file.fileno(), data, begin)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ShardError(
                    f"{SIZE}: found a full disk at {name(begin, begin + len(data))} of {self.shown}; expected space "
                    f"for all shards of this node. Free space on the node, or raise {SIZE}, which requests the space"
                ) from error
            raise
        self.present[block] = 1
        self.fetched_nbytes += len(data)

    def _same_version(self) -> None:
        now: Remote = self._source.describe()
        if (now.nbytes, now.version) != (self.nbytes, self.version):
            raise BadInputError(
                URI, f"{self.shown}, which changed during the training", "the same file until the job ends",
                "start the job again, and do not replace its data",
            )  # fmt: skip

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the copy inside the context, so that the ranks of this pod fetch no block twice."""
        with self._lock.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self.alive()
                    time.sleep(0.05)
            yield


class _CorruptError(BadInputError):
    """A block has another checksum than ``FILE.blocks`` says."""


def _runs(blocks: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each run of consecutive blocks. ``blocks``: their numbers, in ascending order."""
    if len(blocks):
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
            yield int(run[0]), int(run[-1]) + 1


def _beside(uri: str) -> str:
    address, mark, query = uri.partition("?") if uri.startswith("http") else (uri, "", "")
    return f"{address}{SUFFIX}{mark}{query}"


def _retried(source: Source, operation: Callable[[], Any]) -> Any:
    """Return the result of ``operation``, which is repeated after faults of the network."""
    for wait_s in WAITS_S:
        try:
            return operation()
        except TransientError as error:
            say(f"{error}; retrying in {wait_s} s")
            time.sleep(wait_s)
    try:
        return operation()
    except TransientError as error:
        raise ShardError(f"{URI}: {error}") from error
