"""Fetch a job's data into the pod, or check local data: ``python -m dltrain.data.fetch URI --to FILE``.

The init container ``dataset`` of a job's pods runs this command. It downloads ``http``, ``https`` and ``s3`` URIs and
verifies their checksums (``dltrain.data.download``). For ``file`` URIs (files in the image or on a mounted claim) it
only checks the file. A URI that ends in SHA256SUMS stands
for all files that the SHA256SUMS file lists, relative to its folder. Exit codes: 0 for success; 64 if the job's spec
cannot succeed; 74 if a retry may succeed; 143 if the process was stopped. The last line of output gives the reason.
"""

import argparse
import errno
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from dlcontract import DATASET_SUMS
from dltrain.data.download import SAY_EVERY_S, Download, in_units, say, sha256_of, size_of
from dltrain.data.remote_sources import DATASET, Fields, Source
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_NOT_FETCHED, EXIT_OK, EXIT_STOPPED

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_FIELD = "spec.dataset.uri"
_POLL_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dltrain.data.fetch", description="Fetches and checks a dataset.")
    parser.add_argument("uri", help="http://, https://, s3:// or file://")
    parser.add_argument("--to", type=Path, help="file to write; not for file://")
    parser.add_argument("--sha256", help="expected checksum of the file at the URI, in hex digits")
    parser.add_argument("--room", type=int, help="maximum size of all files together, in bytes")
    options = parser.parse_args(arguments)
    local = options.uri.startswith("file://")
    if local == (options.to is not None):
        parser.error(
            f"--to: found {options.to} for {options.uri}; expected a file for http, https and s3 URIs, and no --to "
            "for file:// URIs. Add or remove --to"
        )
    try:
        if local:
            check(Path(options.uri.removeprefix("file://")), options.sha256)
        else:
            fetch(options.uri, options.to, options.sha256, options.room)
    except BadInputError as error:
        say(str(error))
        return EXIT_BAD_INPUT
    except PermissionError as error:
        found = f"no permission of user {os.getuid()} to write {error.filename}"
        remedy = "give group 65532 write permission to the claim's root folder, or use another claim"
        say(str(BadInputError("spec.dataset.cacheClaimName", found, "a claim that this user may write to", remedy)))
        return EXIT_BAD_INPUT
    except OSError as error:  # includes TransientError and errors of the disk
        say(f"{_FIELD}: {error}")
        return EXIT_NOT_FETCHED
    return EXIT_OK


def fetch(uri: str, target: Path, sha256: str | None = None, room_nbytes: int | None = None) -> None:
    """Download ``uri`` to ``target``. If it is a SHA256SUMS file, also download all listed files into the same folder.

    ``sha256``: expected checksum in hex digits, or None. ``room_nbytes``: maximum size of all files together, or None.
    Raise BadInputError if no retry can succeed, and TransientError otherwise.
    """
    folder = target.parent
    notes = folder / ".dljob"
    notes.mkdir(parents=True, exist_ok=True)
    with _alone(notes / "lock"):
        source = Source(uri)
        nbytes = Download(source, target, notes, sha256, room_nbytes).run()
        if target.name != DATASET_SUMS:
            return
        listed = read_sums(target)
        for name, digest in listed.items():
            left = None if room_nbytes is None else room_nbytes - nbytes
            nbytes += Download(source.beside(name), folder / name, notes, digest, left).run()
        say(f"{len(listed)} files, {in_units(nbytes)}")


def check(path: Path, sha256: str | None, fields: Fields = DATASET) -> None:
    """Verify the checksum of a local file. If it is a SHA256SUMS file, also verify all files that it lists.

    ``sha256``: expected checksum in hex digits; None: do not verify the file itself. ``fields``: fields of the spec
    that messages name. Raise BadInputError if a checksum is wrong or a file cannot be read.
    """
    if sha256 is not None:
        _hold(path, sha256, fields.sha256, fields)
    if path.name == DATASET_SUMS:
        for name, digest in read_sums(path).items():
            _hold(path.parent / name, digest, fields.uri, fields)


def _hold(path: Path, sha256: str, field: str, fields: Fields) -> None:
    try:
        found = sha256_of(path)
    except OSError as error:
        found = f"no file {path} that can be read: {error.strerror}"
        raise BadInputError(fields.uri, found, "a file", "correct the URI, or put the file there") from None
    if found != sha256:
        remedy = "correct the checksum, or put the right file there"
        raise BadInputError(field, f"checksum {found} of {path}", sha256, remedy)
    say(f"{path}: {in_units(path.stat().st_size)}, sha256 as expected")


def read_sums(path: Path) -> dict[str, str]:
    """Return file name → checksum for the lines of a SHA256SUMS file. Raise BadInputError if its format is wrong."""
    expected = "lines of a checksum, two spaces and a relative path, as sha256sum writes them"
    listed: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(_FIELD, f"{path}: {error}", expected, "make it with sha256sum") from None
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        name = PurePosixPath(match[2]) if match else PurePosixPath()
        if not match or name.is_absolute() or {"..", ".dljob"} & set(name.parts) or str(name) in (".", DATASET_SUMS):
            raise BadInputError(_FIELD, f"{line[:200]!r} in line {number} of {path.name}", expected, "correct the file")
        listed[str(name)] = match[1]
    if not listed:
        raise BadInputError(_FIELD, f"nothing in {path.name}", expected, "make it with sha256sum")
    return listed


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the file ``path`` inside the context, so that only one process downloads into a folder at a time.

    Other pods wait for the lock and then use the files that the first pod has downloaded.
    """
    with path.open("w") as file:
        said = time.monotonic() - SAY_EVERY_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - said >= SAY_EVERY_S:
                    parts = sum(size_of(part) for part in path.parent.glob("*.part"))
                    say(f"waiting until another pod has fetched the dataset ({in_units(parts)} so far)")
                    said = time.monotonic()
                time.sleep(_POLL_S)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                found = "a claim without file locks"
                raise BadInputError("spec.dataset.cacheClaimName", found, "file locks", "use another claim") from None
        yield


if __name__ == "__main__":
    # For the first process of a container, the kernel ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_STOPPED))
    sys.exit(main())
