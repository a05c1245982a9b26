"""The content of a checkpoint folder, the changes that each pod has made in its own folder, and their union. No I/O.

All pods start with the same content, that of one commit. During the training, each pod has changes of its own: rank 0
writes what only one rank writes, and with sharded state every rank writes its part. The union of the changes is what a
folder on a shared volume would contain. Two differences remain. If several pods write the same path, the file of the
first pod in the plan counts, because scripts of which each node writes the same files would otherwise depend on chance.
A pod only deletes what it has written itself, except the first pod, which deletes for all. A script that clears the
folder of its own node therefore never deletes the checkpoint.
"""

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from dltrain.object_store.commit_log import DamagedError, Entry, StoredFile

LOGS = ("events.out.tfevents.*", "*.log", "*.jsonl", "*.csv")
"""Patterns of names of files that need not settle. A commit contains what is in them at that time."""

Seen = tuple[int, int] | str
"""State of a file: (size in bytes, time of the last change in ns), or the target of a symbolic link."""


@dataclass(frozen=True)
class Content:
    """The content of a folder, with files that are in the store.

    ``files``: path → file. ``times_ns``: path of each file → time of its last change. ``links``: path → target of each
    symbolic link.
    """

    files: Mapping[str, StoredFile] = field(default_factory=dict)
    times_ns: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: Entry) -> "Content":
        """Return the content of a commit. Raise DamagedError if it is invalid."""
        try:
            times = {path: int(entry.about["mtimes_ns"][path]) for path in entry.files}
            links = {str(path): str(target) for path, target in entry.about["links"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"found an invalid entry {entry.sequence} ({type(error).__name__}: {error})") from None
        return cls(entry.files, times, links)

    @property
    def seen(self) -> dict[str, Seen]:
        """Path → state of all files and symbolic links, in the form of ``staged_folder.scan``."""
        return {path: (file.nbytes, self.times_ns[path]) for path, file in self.files.items()} | dict(self.links)

    @property
    def about(self) -> dict[str, Any]:
        """What the marker of a commit says about the content, besides its files."""
        return {"mtimes_ns": dict(self.times_ns), "links": dict(self.links)}

    def only(self, paths: Collection[str]) -> "Content":
        """Return the part of the content with these paths."""
        return Content(
            {path: file for path, file in self.files.items() if path in paths},
            {path: time_ns for path, time_ns in self.times_ns.items() if path in paths},
            {path: target for path, target in self.links.items() if path in paths},
        )

    def over(self, other: "Content") -> "Content":
        """Return the files and links of both. On paths that both have, those of this content count."""
        below = other.only(other.seen.keys() - self.seen.keys())
        return Content(
            {**below.files, **self.files}, {**below.times_ns, **self.times_ns}, {**below.links, **self.links}
        )


@dataclass(frozen=True)
class Changes:
    """How the folder of one pod differs from the commit with which all pods started.

    ``written``: new and changed files and links. ``deleted``: paths of the commit that are missing.
    """

    written: Content = field(default_factory=Content)
    deleted: frozenset[str] = frozenset()

    @classmethod
    def between(cls, start: Content, now: Content) -> "Changes":
        """Return the changes from the content ``start`` to ``now``.

        A file that was deleted and moved back has a new place in the store, and therefore counts as written.
        """
        same = {path for path, file in now.files.items() if start.files.get(path) == file}
        same = {path for path in same if start.times_ns[path] == now.times_ns[path]}
        same |= {path for path, target in now.links.items() if start.links.get(path) == target}
        return cls(now.only(now.seen.keys() - same), frozenset(start.seen.keys() - now.seen.keys()))

    @property
    def state(self) -> tuple[dict[str, Seen], frozenset[str]]:
        """What to compare to find out if the changes are the same, without logs."""
        return without_logs(self.written.seen), frozenset(path for path in self.deleted if not is_log(path))


def union(
    start: Content,
    writers: Mapping[str, str],
    changes: Mapping[str, Changes],
    dropped: Collection[tuple[str, Seen]] = (),
) -> tuple[Content, dict[str, str]]:
    """Return (the content that the folders of all pods have together, path → the pod that has written it).

    ``start``: the content with which all pods started. ``writers``: path in it → pod. Both mappings omit paths of the
    first pod. ``changes``: pod → its changes since, first pod of the plan first. ``dropped``: (path, state) of files of
    other pods that do not count, because the first pod has deleted their folder.
    """
    leader = next(iter(changes))
    gone = changes[leader].deleted
    for pod, each in changes.items():
        gone |= {path for path in each.deleted if writers.get(path, leader) == pod}
    content, found = Content(), dict[str, str]()
    for pod, each in changes.items():
        wanted = [path for path, state in each.written.seen.items() if pod == leader or (path, state) not in dropped]
        content, added = _added(content, each.written, wanted)
        if pod != leader:
            found |= dict.fromkeys(added, pod)
    content, added = _added(content, start, [path for path in start.seen if path not in gone])
    return content, found | {path: writers[path] for path in added if path in writers}


def _added(content: Content, other: Content, paths: Collection[str]) -> tuple[Content, list[str]]:
    """Add ``paths`` of ``other`` to ``content``. Return (the result, the paths that were added).

    Leave out paths that ``content`` has, and those that need a folder where it has a file, or the reverse.
    """
    taken = content.seen.keys()
    folders = {str(parent) for path in taken for parent in PurePosixPath(path).parents}
    added = [path for path in paths if path not in taken and path not in folders and not _is_in(path, taken)]
    return content.over(other.only(set(added))), added


def _is_in(path: str, folders: Collection[str]) -> bool:
    """Return True if one of ``folders`` contains ``path``, directly or in further folders."""
    return any(str(parent) in folders for parent in PurePosixPath(path).parents)


def without_logs(seen: Mapping[str, Seen]) -> dict[str, Seen]:
    """Return ``seen`` without log files. The folder settles when all files but these no longer change."""
    return {path: state for path, state in seen.items() if not is_log(path)}


def is_log(path: str) -> bool:
    return any(fnmatch.fnmatch(PurePosixPath(path).name, pattern) for pattern in LOGS)
