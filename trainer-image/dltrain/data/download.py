"""Download of one remote file. The download can be resumed, is verified, and replaces the target file atomically.

The folder ``.dljob`` beside the data contains the partial file and a JSON file (a note) with the version of the partial
or complete file. With these, a restarted pod can resume the download, as can the next pod that uses a shared cache.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dltrain.data.remote_sources import NoRangesError, Remote, Source, TransientError
from dltrain.protocol.errors import BadInputError

WAITS_S = (0.5, 1.0, 2.0, 4.0)
"""Delays in seconds before the first, second, … retry of a download.

After a try that received data, the first delay is next. When all delays are used up, the download fails.
"""
PATIENCE_S = 15.0
"""Seconds without received data after which no further retry starts, so that the download fails.

The container then fails, so that the job's status shows the fault within 30 s. The kubelet restarts the container after
10 s, then 20 s and so on up to 5 minutes, and the download continues where it ended.
"""
SAY_EVERY_S = 10.0
_READ_NBYTES = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)


def say(text: str) -> None:
    print(f"dltrain.data.fetch: {text}", flush=True)  # noqa: T201 - for the container's log


def in_units(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


class Progress:
    """Progress of the download of one file, which is logged every ``SAY_EVERY_S`` seconds."""

    def __init__(self, name: str, total_nbytes: int | None, done_nbytes: int) -> None:
        self._name, self._total, self._done, self._first = name, total_nbytes, done_nbytes, done_nbytes
        self._began = self._said = time.monotonic()

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            speed_Bps = (self._done - self._first) / (now - self._began)
            if self._total:
                left_s = (self._total - self._done) / speed_Bps
                of = f" of {in_units(self._total)} ({100 * self._done / self._total:.0f} %), {left_s:.0f} s left"
            else:
                of = ""
            say(f"{self._name}: {in_units(self._done)}{of}, {speed_Bps / 1e6:.1f} MB/s")

    def end(self) -> str:
        seconds = time.monotonic() - self._began
        return f"{in_units(self._done)}, {in_units(self._done - self._first)} of it fetched in {seconds:.1f} s"


@dataclass(frozen=True)
class Download:
    """The download of the file ``source`` to the path ``target``.

    ``sha256``: expected checksum in hex digits; None: any checksum is accepted. ``room_nbytes``: maximum size of the
    file in bytes; None: no limit.
    """

    source: Source
    target: Path
    notes: Path
    """The folder ``.dljob`` for partial files and notes."""
    sha256: str | None = None
    room_nbytes: int | None = None

    def run(self) -> int:
        """Download and verify the file. Return its size in bytes.

        Raise BadInputError if no retry can succeed, and TransientError after the last retry.
        """
        if (nbytes := self._complete()) is not None:
            say(f"{self.target.name}: {in_units(nbytes)} already present")
            return nbytes
        waits, since, damaged, ranges = iter(WAITS_S), time.monotonic(), False, True
        while True:
            before = size_of(self._part)
            try:
                return self._try(ranges)
            except NoRangesError:
                say(f"{self.source.shown}: the server supports no range requests, so downloads that break start over")
                ranges = False
            except _DamagedError as error:
                if damaged:
                    raise self._wrong(error.found) from None
                say(f"{self.target.name}: the resumed file has checksum {error.found}; retrying from the start")
                damaged = True
            except TransientError as error:
                if ranges and size_of(self._part) > before:
                    waits, since = iter(WAITS_S), time.monotonic()
                if (wait_s := next(waits, None)) is None or time.monotonic() - since > PATIENCE_S:
                    raise
                say(f"{error}; retrying in {wait_s} s")
                time.sleep(wait_s)
                self.source.shrink_requests()

    @property
    def _part(self) -> Path:
        return self.notes / f"{self._key}.part"

    @property
    def _note(self) -> Path:
        return self.notes / f"{self._key}.json"

    @property
    def _key(self) -> str:
        return hashlib.sha256(str(self.target.relative_to(self.notes.parent)).encode()).hexdigest()[:16]

    def _complete(self) -> int | None:
        """Return the size of the target file in bytes if an earlier download completed it and it is still valid.

        Return None if the file must be downloaded. The file is valid if neither the file nor its source has changed. If
        the source cannot be reached, an unchanged file counts as valid.
        """
        note = _read(self._note)
        try:
            found = self.target.stat()
        except FileNotFoundError:
            return None
        if (note.get("nbytes"), note.get("mtime_ns")) != (found.st_size, found.st_mtime_ns):
            return None
        if self.sha256 is not None:
            # The note does not prove the checksum: every job that uses a cache claim can write to it.
            if note.get("sha256") == self.sha256 and (now := sha256_of(self.target)) != self.sha256:
                say(f"{self.target.name}: found checksum {now}; expected {self.sha256}. Fetching the file again")
                return None
            return found.st_size if note.get("sha256") == self.sha256 else None
        try:
            return found.st_size if self.source.describe().version == note.get("version") != "" else None
        except (BadInputError, TransientError) as error:
            say(f"{error}; using the file that was fetched before")
            return found.st_size

    def _try(self, ranges: bool) -> int:
        remote = self.source.describe()
        self._fits(remote.nbytes)
        ranges = ranges and remote.nbytes is not None
        have = self._resumable(remote) if ranges else 0
        digest = hashlib.sha256()
        if have:
            say(f"{self.target.name}: resuming at {in_units(have)}")
            for data in _chunks(self._part):
                digest.update(data)
        else:
            say(f"{self.target.name}: fetching {self.source.shown}{_of(remote.nbytes)}")
        progress, nbytes = Progress(self.target.name, remote.nbytes, have), have
        with _disk(self.target), self._part.open("ab" if have else "wb") as file:
            if ranges:
                assert remote.nbytes is not None
                _write(self._note, version=remote.version, of_nbytes=remote.nbytes)
                pieces = self.source.read(have, remote.nbytes)
            else:
                pieces = self.source.stream()
            for data in pieces:
                file.write(data)
                digest.update(data)
                nbytes += len(data)
                self._fits(nbytes)
                progress.add(len(data))
            file.flush()
            os.fsync(file.fileno())
        self._check(digest.hexdigest(), nbytes, remote, resumed=bool(have))
        with _disk(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._part.replace(self.target)
            stamp = self.target.stat().st_mtime_ns
            _write(self._note, version=remote.version, nbytes=nbytes, mtime_ns=stamp, sha256=digest.hexdigest())
        checked = "as expected" if self.sha256 else f"not verified: set {self.source.fields.sha256} to this checksum"
        say(f"{self.target.name}: {progress.end()}; sha256 {digest.hexdigest()}, {checked}")
        return nbytes

    def _resumable(self, remote: Remote) -> int:
        """Return the size in bytes of the partial file if the download can be resumed from it, otherwise 0.

        The partial file must belong to the version of the file that the server has now.
        """
        note, have = _read(self._note), size_of(self._part)
        same = (note.get("version"), note.get("of_nbytes")) == (remote.version, remote.nbytes)
        # If the server reports no version, only a checksum can show that the old and the new part belong together.
        known = bool(remote.version) or self.sha256 is not None
        return have if same and known and have <= (remote.nbytes or 0) else 0

    def _fits(self, nbytes: int | None) -> None:
        if nbytes is None:
            return
        if self.room_nbytes is not None and nbytes > self.room_nbytes:
            self._part.unlink(missing_ok=True)
            room, fields = in_units(self.room_nbytes), self.source.fields
            if fields.size is None:
                raise BadInputError(fields.uri, f"a file of {in_units(nbytes)}", f"at most {room}", "make it smaller")
            raise BadInputError(
                fields.size, f"{room} left for {self.target.name}", f"at least {in_units(nbytes)}",
                f"raise {fields.size}",
            )  # fmt: skip
        free = shutil.disk_usage(self.notes).free + size_of(self._part)
        if nbytes > free:
            raise TransientError(_full(self.target, f"{in_units(nbytes)} needed, {in_units(free)} free"))

    def _check(self, found: str, nbytes: int, remote: Remote, *, resumed: bool) -> None:
        if remote.nbytes is not None and nbytes != remote.nbytes:
            raise TransientError(
                f"{self.source.shown}: found {nbytes} bytes after the download; expected {remote.nbytes}, as its "
                "server reported"
            )
        if self.sha256 is not None:
            if found == self.sha256:
                return
            self._part.unlink()
            raise _DamagedError(found) if resumed else self._wrong(found)
        if self.source.describe().version != remote.version:
            self._part.unlink()
            raise TransientError(
                f"{self.source.shown}: found another version of the file after the download than before; expected the "
                "same version"
            )

    def _wrong(self, found: str) -> BadInputError:
        return BadInputError(
            self.source.fields.sha256, f"checksum {found} of {self.source.shown}", str(self.sha256),
            "correct the checksum, or put the right file there",
        )  # fmt: skip


class _DamagedError(Exception):
    """A resumed download has a wrong checksum, so the partial file may have been damaged."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


@contextmanager
def _disk(target: Path) -> Iterator[None]:
    """Raise TransientError instead of OSError if the disk is full inside the context. ``target``: the written file."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise TransientError(_full(target, str(error.strerror))) from error
        raise


def _full(target: Path, words: str) -> str:
    return (
        f"the disk for {target.parent} is full: {words}. Free space on the node or the claim, or raise "
        "spec.dataset.size, which requests the space"
    )


def _of(nbytes: int | None) -> str:
    return "" if nbytes is None else f", {in_units(nbytes)}"


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_READ_NBYTES):
            yield data


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hex digits. Raises OSError if the file cannot be read."""
    digest = hashlib.sha256()
    for data in _chunks(path):
        digest.update(data)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a note, a JSON file about a download; empty if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, **note: Any) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(note))
    fresh.replace(path)
