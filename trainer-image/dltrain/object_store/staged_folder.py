"""The folder in which a script writes its checkpoints, on the local disk: uploaded when it settles, and restored.

A commit holds the whole folder at one time. A file that has not changed since the last commit is not uploaded again.
The folder counts as settled if nothing in it has changed for ``SETTLE_S`` seconds, except logs, to which a script adds
lines all the time. A script that pauses for longer between two files of a checkpoint gets a commit with the first ones
alone, and the next commit has all of them. Such a script writes into a folder beside this one and moves it here at the
end, or writes one file last and resumes only from checkpoints with that file.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from dltrain.object_store.commit_log import CommitLog, DamagedError, Entry, StoredFile
from dltrain.object_store.content import Content, Seen, is_log, without_logs
from dltrain.object_store.notices import UploadNotices
from dltrain.object_store.reading import LogReader, fetch, tell

KIND = "folder"
WRITERS = "writers"
"""Name of the field of a commit marker with path → the pod that has written it. Paths of rank 0's pod are omitted."""
SETTLE_S = 3.0
"""Seconds without a change after which the content of the folder counts as complete."""
_READ_NBYTES = 4 * 2**20


class ChangedError(Exception):
    """The folder has changed during the upload. The upload is repeated when the folder has settled again."""


def scan(folder: Path) -> dict[str, Seen]:
    """Return path in the folder → state, for all files and symbolic links. Files that vanish meanwhile are left out."""
    found: dict[str, Seen] = {}
    for parent, folders, names in os.walk(folder):
        for name in (*names, *folders):
            path = Path(parent, name)
            with suppress(OSError):
                key = path.relative_to(folder).as_posix()
                if path.is_symlink():
                    found[key] = str(path.readlink())
                elif path.is_file():
                    stat = path.stat()
                    found[key] = (stat.st_size, stat.st_mtime_ns)
    return found


class StagedFolder:
    """The folder ``folder`` and its commits in the log. ``keep``: number of commits to keep.

    The file ``note`` beside the folder says from which commit the content of the folder comes. ``has_parts``: True if
    each pod of the job has such a folder with its part of a checkpoint. ``notices``: tells the agent about uploads.
    """

    def __init__(
        self, folder: Path, log: CommitLog, keep: int, *, has_parts: bool = False, notices: UploadNotices | None = None
    ) -> None:
        self.folder, self.log, self.keep, self.has_parts = folder, log, keep, has_parts
        self.notices = notices or UploadNotices()
        self._note = folder.with_name(f".{folder.name}.json")
        self._reader = LogReader(log, KIND)
        self._base: Entry | None = None
        """The commit from which the content of the folder comes, or to which it was uploaded last."""
        self._uploads = 0
        self._committed_here = False
        """True if this process has committed the content of the folder."""

    @property
    def committed(self) -> dict[str, Seen]:
        """Return path → state of each file in the last commit, in the form of ``scan``."""
        return self.content.seen

    @property
    def base(self) -> Entry | None:
        """Return the last commit, or the one with which the ranks have started; None if there is none."""
        return self._base

    @property
    def content(self) -> Content:
        """Return the content of that commit."""
        return Content() if self._base is None else Content.of(self._base)

    def open(self) -> None:
        """Continue with the content of the folder and the commit from which it comes. Raise OSError, DamagedError."""
        sequence = self._read_note().get("sequence", 0)
        self._base = self.log.entry(sequence) if sequence else None

    def note_time(self) -> None:
        """Note that ranks may still write to the folder at this time."""
        with suppress(FileNotFoundError):  # Nothing was restored.
            os.utime(self._note)

    def restore(self, ended_unix_s: float | None) -> int:
        """Claim the term, and make folder and log agree. Return the number of the commit in both; 0 without a commit.

        If the folder has newer content that had settled at ``ended_unix_s``, the Unix time at which the ranks ended,
        upload it. None: at an unknown time, such as because the whole container ended with them. It is then the time
        that was noted last. Otherwise, or if other pods may have parts of the newer content, restore the newest valid
        commit, or delete the content if there is none. Raise FencedError if another run has taken over, BadInputError
        for a wrong bucket or a missing permission, ChangedError if the folder changes, and OSError if the store or disk
        fails.
        """
        self._reader.open()
        here, note = scan(self.folder), self._read_note()
        ended_s = ended_unix_s if ended_unix_s is not None else self._noted_s()
        sequence = self._reader.newest(lambda entry: self._reusable(entry, note, here, ended_s))
        if sequence is None:
            self._base = None
            if here and note and self._is_settled({}, note, ended_s):
                self.upload(final=True)  # Nothing was uploaded yet.
            else:
                if note:
                    _tell_discarded(here.keys(), note)
                self._clear({})
        if self._base is not None and without_logs(self.committed) != without_logs(scan(self.folder)):
            self.upload(final=True)
        self._write_note()
        if not self._committed_here:
            self.notices.resumes(self.log, self._base)
        return 0 if self._base is None else self._base.sequence

    def _reusable(self, entry: Entry, note: Mapping[str, Any], here: Mapping[str, Seen], ended_unix_s: float) -> int:
        """Make the folder continue from ``entry``. Return the number of ``entry``.

        Keep the folder if, by its ``note``, its content comes from ``entry`` and all changes since were settled at
        ``ended_unix_s``, the Unix time at which the ranks ended. Otherwise, or if the script has deleted all files to
        write new ones, restore ``entry``. ``here``: the folder's files.
        """
        there = Content.of(entry).seen
        is_same = note.get("sequence") == entry.sequence
        if is_same and self._is_settled(there, note, ended_unix_s) and not is_emptied(there, here):
            self._base = entry
        else:
            if is_same or _is_part(note):
                _tell_discarded(_changed(there, here) & here.keys(), note)
            self.restore_entry(entry)
        return entry.sequence

    def _is_settled(self, there: Mapping[str, Seen], note: Mapping[str, Any], ended_unix_s: float) -> bool:
        """Return True if all changes since the state ``there`` were settled at ``ended_unix_s``.

        Return False if, by the ``note``, other pods may have parts of the content, which are not known.
        """
        return not _is_part(note) and self.newest_change_s(there) <= ended_unix_s - SETTLE_S

    def newest_change_s(self, there: Mapping[str, Seen]) -> float:
        """Return the Unix time of the last change since the state ``there``; 0 if nothing has changed.

        Deletions count: a script may delete its checkpoint to write the next one in its place.
        """
        return max((self._changed_s(path) for path in _changed(there, scan(self.folder))), default=0.0)

    def _changed_s(self, path: str) -> float:
        """Return the Unix time at which ``path`` changed last; the current time if it is unknown.

        If ``path`` is missing, return the time of the innermost of its folders that exists: the deletion changed it.
        """
        for each in (path, *map(str, PurePosixPath(path).parents)):
            try:
                stat = (self.folder / each).lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                break
            return max(stat.st_mtime, stat.st_ctime)
        return time.time()

    def restore_sequence(self, sequence: int) -> None:
        """Restore the commit with this number, which another pod has chosen; 0: delete all files. Raise OSError,
        DamagedError.
        """
        if sequence:
            self.restore_entry(self.log.entry(sequence))
        else:
            self._clear({})
        self._write_note()

    def restore_entry(self, entry: Entry) -> None:
        """Make the folder equal to a commit. Files that are equal already are not downloaded. Raise OSError.

        Raise DamagedError if the commit or one of its files is damaged.
        """
        wanted = Content.of(entry).seen
        for path in wanted:
            pure = PurePosixPath(path)
            in_link = any(isinstance(wanted.get(str(parent)), str) for parent in pure.parents)
            if not pure.parts or pure.is_absolute() or ".." in pure.parts or in_link:
                raise DamagedError(f"found the path {path!r} in entry {entry.sequence}")
        self._base = None
        here = self._clear(wanted)
        for path, state in wanted.items():
            if here.get(path) == state:
                continue
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(state, str):
                target.symlink_to(state)
                continue
            partial = self.folder.with_name(f".{self.folder.name}.part")
            fetch(self.log.store, entry.files[path], partial)
            os.utime(partial, ns=(state[1], state[1]))
            partial.replace(target)
        self._base = entry

    def _clear(self, wanted: Mapping[str, Seen]) -> dict[str, Seen]:
        """Delete all files that differ from ``wanted``. Return the state of those that are left.

        Forget before that from which commit they come. If a restore ends halfway, the files that are missing then must
        not be taken for files that the script has deleted.
        """
        self._note.unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        left = {}
        for path, state in scan(self.folder).items():
            if wanted.get(path) == state:
                left[path] = state
            else:
                (self.folder / path).unlink(missing_ok=True)
        for parent, _, _ in os.walk(self.folder, topdown=False):
            if Path(parent) != self.folder:
                with suppress(OSError):  # Only empty folders can be deleted.
                    Path(parent).rmdir()
        return left

    def upload(self, *, final: bool = False) -> Entry | None:
        """Commit the content of the folder, if it differs from the last commit. Return the commit, or None.

        ``final``: also commit if only logs differ. Raise ChangedError if the folder changes meanwhile, FencedError if
        another run has taken over, and OSError if the upload fails. The last commit then stays valid.
        """
        select = dict if final else without_logs
        began_s, before = time.monotonic(), self.content
        if select(scan(self.folder)) == select(self.committed):
            return None
        content = self.upload_content(before, without_logs(scan(self.folder)))
        self._base = self.log.commit(KIND, content.files, content.about)
        self._committed_here = True
        self._write_note()
        self.notices.committed(self.log, self._base, before, time.monotonic() - began_s)
        self._reader.prune(self.keep)
        return self._base

    def upload_content(self, uploaded: Content, state: Mapping[str, Seen]) -> Content:
        """Upload the files that differ from ``uploaded``, which is in the store. Return the content of the folder.

        ``state``: the expected state of all files but logs. Raise ChangedError if the folder has another state or
        changes meanwhile, and OSError if the upload fails.
        """
        before, there = scan(self.folder), uploaded.seen
        _check(before, state)
        self._uploads += 1
        files: dict[str, StoredFile] = {}
        links: dict[str, str] = {}
        times: dict[str, int] = {}
        for path, seen in before.items():
            if isinstance(seen, str):
                links[path] = seen
            elif there.get(path) == seen:
                files[path], times[path] = uploaded.files[path], seen[1]
            else:
                try:
                    files[path] = self._upload_file(path, seen[0])
                    times[path] = seen[1]
                except FileNotFoundError:
                    if not is_log(path):
                        raise ChangedError(path) from None
        _check(scan(self.folder), state)
        return Content(files, times, links)

    @property
    def uploads(self) -> int:
        """Return the number of uploads of this run. It is part of the keys of their files."""
        return self._uploads

    def commit(
        self,
        content: Content,
        writers: Mapping[str, str],
        runs: Collection[str],
        spared: Callable[[str], bool],
    ) -> Entry:
        """Commit the content of the folders of all pods. Return the commit. The next ranks of the job start with it.

        ``writers``: path → the pod that has written it, except the first. ``runs``: names of the runs that have
        uploaded files of other pods. ``spared``: returns True for a key that another pod still needs. Raise FencedError
        if another run has taken over, and OSError if the store fails or has lost a file.
        """
        entry = self.log.commit(KIND, content.files, content.about | {WRITERS: dict(writers)}, runs)
        self._reader.prune(self.keep, spared)
        return entry

    def _upload_file(self, path: str, nbytes: int) -> StoredFile:
        key = self.log.data_key(f"{self._uploads:06d}/{path}")
        with (self.folder / path).open("rb") as file:
            return StoredFile(key, *self.log.store.upload(key, _pieces(file, nbytes, path), nbytes))

    def _read_note(self) -> dict[str, Any]:
        try:
            found = json.loads(self._note.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _noted_s(self) -> float:
        """Return the Unix time of the last call of ``note_time``, or of the last commit; 0 without a note."""
        try:
            return self._note.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _write_note(self) -> None:
        """Note the last commit. The folder of a new pod lacks the note."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._note.with_suffix(".new")
        sequence = 0 if self._base is None else self._base.sequence
        temporary.write_text(json.dumps({"sequence": sequence} | ({"part": True} if self.has_parts else {})))
        temporary.replace(self._note)


def _check(now: Mapping[str, Seen], state: Mapping[str, Seen]) -> None:
    """Raise ChangedError unless the files ``now`` are, without logs, in the expected ``state``."""
    if changed := _changed(state, now):
        raise ChangedError(min(changed))


def _is_part(note: Mapping[str, Any]) -> bool:
    """Return True if, by the ``note`` beside a folder, other pods may have parts of the content as well."""
    return note.get("part") is True


def _tell_discarded(paths: Collection[str], note: Mapping[str, Any]) -> None:
    """Log that files are discarded: parts of a checkpoint by the ``note`` beside the folder, or incomplete ones."""
    if paths:
        why = "not in a checkpoint of all pods" if _is_part(note) else "still being written"
        tell(f"discarded {len(paths)} files that were {why}, such as {min(paths)}")


def _pieces(file: Any, nbytes: int, path: str) -> Iterator[bytes]:
    """Yield the first ``nbytes`` bytes of an open file. Raise ChangedError if it has become shorter."""
    while nbytes:
        piece = file.read(min(nbytes, _READ_NBYTES))
        if not piece:
            raise ChangedError(path)
        nbytes -= len(piece)
        yield piece


def is_emptied(before: Mapping[str, Seen], now: Mapping[str, Seen]) -> bool:
    """Return True if there were files before, and no files but logs are left now. Such a folder has no checkpoint."""
    return bool(without_logs(before)) and not without_logs(now)


def _changed(before: Mapping[str, Seen], now: Mapping[str, Seen]) -> set[str]:
    """Return the paths that are new, have changed or are missing, without logs."""
    return {path for path, _ in without_logs(before).items() ^ without_logs(now).items()}
