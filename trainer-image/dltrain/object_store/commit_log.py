"""The log of complete checkpoints in an object store: an atomic commit, one writer, and no use of parts of an upload.

``commits/0000000007.json`` is the seventh entry: either the commit marker of a checkpoint, written after all of its
files, or the claim of a run that has taken over. Entries are created with a conditional write (``If-None-Match: *``),
so two writers never create the same entry. A writer that finds an entry of a higher term in the place of its own is
fenced. Together this orders claims and commits: once a run has claimed its term, no run with a lower term can commit.

A store without conditional writes cannot guarantee that. There, the log is checked before and after each entry.

``data/t0000000003-1a2b3c4d/`` holds the files that one run of term 3 has uploaded. What no marker names is the rest of
an interrupted upload, is never read, and is deleted after the next commit. Files of a higher term are never deleted.
"""

import hashlib
import json
import re
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dltrain.object_store.client import FIELD, ObjectStore
from dltrain.protocol.errors import BadInputError, FencedError

FORMAT, PARTS_FORMAT = 1, 2
"""Formats of entries. Releases that cannot read the parts of several ranks reject the second one with a message."""
COMMITS, DATA = "commits/", "data/"
_ENTRY = re.compile(r"commits/(\d{10})\.json")
_RUN = re.compile(r"data/t(\d{10})-")


class DamagedError(Exception):
    """An entry of the log, or a file of a checkpoint, is proven to be damaged or missing."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint: its key in the store, its size in bytes, and its SHA-256 in hex digits."""

    key: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """An entry of the log. ``kind`` is "claim", or says what a commit marker stands for.

    ``files``: path of each file in the checkpoint → the file. ``about``: other data about the checkpoint, as JSON.
    """

    sequence: int
    term: int
    kind: str
    unix_s: float
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_commit(self) -> bool:
        return self.kind != "claim"


class CommitLog:
    """The log of the checkpoints of one job, for a run with ``term``. Only one thread may use it at a time.

    A term is a number that rises whenever another coordinator takes over the job. A run whose term is lower than one in
    the log raises FencedError instead of adding an entry. A term of 0 is neither claimed nor compared.
    """

    def __init__(self, store: ObjectStore, term: int) -> None:
        self.store, self.term = store, term
        self.run = f"t{term:010d}-{uuid.uuid4().hex[:12]}"
        """The name of this run's folder in the store."""
        self._conditional = True
        self._known: dict[int, Entry] = {}

    def claim(self) -> None:
        """Add a claim if the log has no entry of this term. A successful claim shows that the store works.

        The store can then be read, listed and written. Raise FencedError if the log has an entry of a higher term, and
        OSError if the store fails.
        """
        newest = self._newest()
        self._check(newest)
        if newest is None or newest.term < self.term:
            self._add("claim", {}, {})

    def highest_term(self) -> int:
        """Return the highest term that any run has claimed; 0 for an empty log. Raise OSError."""
        newest = self._newest()
        return 0 if newest is None else newest.term

    def sequences(self) -> list[int]:
        """Return the numbers of all entries, oldest first. Raise OSError."""
        return sorted(int(found[1]) for key in self.store.list(COMMITS) if (found := _ENTRY.fullmatch(key)))

    def entry(self, sequence: int) -> Entry:
        """Return an entry. Raise OSError if it cannot be read, and DamagedError if it is missing or invalid.

        ``sequence``: its number.
        """
        if sequence not in self._known:
            try:
                content = self.store.read(_key(sequence))
            except FileNotFoundError:
                raise DamagedError(f"found no {_key(sequence)}") from None
            self._known[sequence] = _parsed(sequence, content)
        return self._known[sequence]

    def commits(self) -> list[Entry]:
        """Return all valid commit markers, oldest first. Raise OSError if the log cannot be read."""
        found = []
        for sequence in self.sequences():
            with suppress(DamagedError):
                found.append(self.entry(sequence))
        return [entry for entry in found if entry.is_commit]

    def commit(
        self,
        kind: str,
        files: Mapping[str, StoredFile],
        about: Mapping[str, Any],
        runs: Collection[str] = (),
        version: int = FORMAT,
    ) -> Entry:
        """Add a commit marker, after which the checkpoint counts. All its files must be complete.

        Verify that the store has the files of this run, and of ``runs``, in the expected sizes. Raise FencedError if
        another run has taken over, OSError if the store fails or has lost a file. ``kind``: what the marker stands for.
        ``files``: path → file. ``about``: other data about the checkpoint. ``runs``: names of the runs of other pods
        that have uploaded some of the files. ``version``: format of the marker.
        """
        for run in {self.run, *runs}:
            new = [file for file in files.values() if file.key.startswith(f"{DATA}{run}/")]
            sizes = self.store.list(f"{DATA}{run}/") if new else {}
            for file in new:
                if sizes.get(file.key) != file.nbytes:
                    raise OSError(
                        f"{self.store.path(file.key)}: found {sizes.get(file.key, 'no')} bytes after the upload; "
                        f"expected {file.nbytes} bytes"
                    )
        self._check(self._newest())
        return self._add(kind, files, about, version)

    def prune(
        self, keep: int, damaged: Collection[int], doubtful: Collection[int], spared: Callable[[str], bool]
    ) -> None:
        """Delete old and damaged checkpoints, old claims, and the remains of interrupted uploads. Raise OSError.

        ``keep``: number of newest commits to keep. ``damaged``: numbers of entries that are proven damaged, which are
        deleted. ``doubtful``: numbers of entries that could not be read, which do not count. ``spared``: returns True
        for a key that another pod of this run still needs. Entries are deleted before their files, so that an
        interruption leaves no entry without files. Raise FencedError if another run has taken over.
        """
        sequences, entries = self.sequences(), {}
        for sequence in sequences:
            with suppress(DamagedError):
                entries[sequence] = self.entry(sequence)
        if not entries:
            return
        newest = entries[max(entries)]
        self._check(newest)
        good = [n for n in entries if entries[n].is_commit and n not in damaged and n not in doubtful][-keep:]
        oldest = min(good, default=0)
        kept = {
            n: entry
            for n, entry in entries.items()
            if n == newest.sequence or (entry.is_commit and n not in damaged and n >= oldest)
        }
        unwanted = [n for n in sequences if n < newest.sequence and n not in kept and (n in entries or n in damaged)]
        self.store.delete(map(_key, unwanted))
        for sequence in unwanted:
            self._known.pop(sequence, None)
        if any(n not in entries for n in sequences if n not in damaged):
            return  # An entry that could not be parsed may name any file.
        named = {file.key for entry in kept.values() for file in entry.files.values()}
        unnamed = [key for key in self.store.list(DATA) if key not in named and self._is_mine(key)]
        self.store.delete(key for key in unnamed if not spared(key))

    def uri(self, entry: Entry) -> str:
        """Return the URI of ``entry``."""
        return self.store.path(_key(entry.sequence))

    def abort_uploads(self) -> None:
        """Abort incomplete uploads of earlier runs. Raise OSError."""
        self.store.abort_uploads(DATA, lambda key: self._is_mine(key) and not key.startswith(f"{DATA}{self.run}/"))

    def data_key(self, name: str) -> str:
        """Return the key for a new file of this run."""
        return f"{DATA}{self.run}/{name}"

    def _is_mine(self, key: str) -> bool:
        """Return True if a run whose term is not higher has written ``key``. Such a run has ended, or is fenced."""
        found = _RUN.match(key)
        return found is not None and int(found[1]) <= self.term

    def _newest(self) -> Entry | None:
        for sequence in reversed(self.sequences()):
            with suppress(DamagedError):
                return self.entry(sequence)
        return None

    def _check(self, newest: Entry | None) -> None:
        if newest is not None and newest.term > self.term > 0:
            raise FencedError(
                f"{self.store.path(_key(newest.sequence))}: found term {newest.term}; expected {self.term}. Another "
                "coordinator has taken over the job, so this run writes no more checkpoints"
            )

    def _add(
        self, kind: str, files: Mapping[str, StoredFile], about: Mapping[str, Any], version: int = FORMAT
    ) -> Entry:
        """Add an entry after all others: a claim, or a commit marker of a checkpoint with its ``files``.

        ``kind``: what the entry stands for. ``about``: other data about it. ``version``: its format. Raise FencedError
        if an entry of a higher term comes first, and OSError if the store fails.
        """
        own = uuid.uuid4().hex
        sequence = max(self.sequences(), default=0) + 1
        while True:
            content = {
                "format": version,
                "term": self.term,
                "kind": kind,
                "unix_s": time.time(),
                "own": own,
                "files": {name: [file.key, file.nbytes, file.sha256] for name, file in files.items()},
                "about": dict(about),
            }
            text = json.dumps(content | {"sha256": _digest(content)}, indent=1).encode()
            try:
                self.store.create(_key(sequence), text, conditional=self._conditional)
            except NotImplementedError:
                self._conditional = False
                _tell(f"{self.store.uri} has no conditional writes, so a second writer is detected later")
                continue
            except FileExistsError:
                found = json.loads(self.store.read(_key(sequence)))
                if found.get("own") != own:  # Otherwise, only the answer to an earlier request was lost.
                    with suppress(DamagedError):
                        self._check(self.entry(sequence))
                    sequence += 1
                    continue
            self._known[sequence] = entry = _parsed(sequence, text)
            if not self._conditional:
                self._check(self._newest())
            return entry


def _key(sequence: int) -> str:
    return f"{COMMITS}{sequence:010d}.json"


def _parsed(sequence: int, content: bytes) -> Entry:
    try:
        found = json.loads(content)
        claimed = found.pop("sha256")
        if claimed != _digest(found):
            raise DamagedError(f"found content of {_key(sequence)} that does not match its sha256 field")
        if found["format"] not in (FORMAT, PARTS_FORMAT):
            raise BadInputError(
                FIELD, f"{_key(sequence)} of format {found['format']}", f"format {FORMAT} or {PARTS_FORMAT}",
                "use the trainer image that wrote the checkpoint",
            )  # fmt: skip
        files = {name: StoredFile(*each) for name, each in found["files"].items()}
        return Entry(sequence, int(found["term"]), str(found["kind"]), float(found["unix_s"]), files, found["about"])
    except BadInputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedError(f"found an invalid {_key(sequence)} ({type(error).__name__}: {error})") from None


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _tell(text: str) -> None:
    print(f"dltrain: {text}", file=sys.stderr, flush=True)  # noqa: T201
