"""Writing files from an untrusted origin into a folder: nothing gets outside of it, and its size is limited."""

import os
import posixpath
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dltrain.data.download import in_units
from dltrain.protocol.errors import BadInputError

MAX_NBYTES = 2**30
"""Maximum size in bytes of all files together, and of an archive or a pack file. The volume holds twice as much."""
MAX_ENTRIES = 20_000
"""Maximum number of files, folders and links."""
READ_NBYTES = 2**20


@dataclass
class Files:
    """Files that are written into the new folder ``root``. ``origin``: field of the spec they come from.

    All methods raise BadInputError if a name or the size is not acceptable, and OSError if the disk fails. Links are
    created by ``finish`` alone, after all files, so that no file is ever written through a link.
    """

    root: Path
    origin: str
    max_nbytes: int = MAX_NBYTES
    max_entries: int = MAX_ENTRIES
    nbytes: int = 0
    entries: int = 0
    _links: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all files, and set the counts of bytes and entries to 0."""
        self.nbytes = self.entries = 0
        self._links.clear()
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True, mode=0o755)
        self.root.chmod(0o755)

    def folder(self, name: str) -> None:
        path = self._place(name, may_be_top=True)
        if path.is_dir():
            self._count()  # An archive may repeat it without an end.
        self._folder(path)

    def file(self, name: str, pieces: Iterable[bytes], *, executable: bool = False) -> None:
        """Write a file. ``name``: path relative to the folder. ``pieces``: its content."""
        path = self._place(name)
        self._count()
        self._folder(path.parent)
        if path in self._links or os.path.lexists(path):
            raise self.refusal(f"two entries with the name {name!r}", "different names")
        with path.open("wb") as file:
            for piece in pieces:
                self.nbytes += len(piece)
                if self.nbytes > self.max_nbytes:
                    raise self.refusal(
                        f"more than {in_units(self.max_nbytes)} of files", f"at most {in_units(self.max_nbytes)}",
                        "remove what the script does not need, and load data with spec.dataset",
                    )  # fmt: skip
                file.write(piece)
        path.chmod(0o755 if executable else 0o644)

    def link(self, name: str, target: str) -> None:
        """Remember a symbolic link. ``target``: its text, a path relative to the folder of the link."""
        path = self._place(name)
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if not target or "\0" in target or target.startswith("/") or inside == ".." or inside.startswith("../"):
            raise self._leaves(name, target)
        self._count()
        self._folder(path.parent)
        if path in self._links or os.path.lexists(path):
            raise self.refusal(f"two entries with the name {name!r}", "different names")
        self._links[path] = target

    def finish(self) -> None:
        """Create the links. Raise BadInputError if one leaves the folder, which a link through another link may do."""
        for path, target in self._links.items():
            path.symlink_to(target)
        root = os.path.realpath(self.root)
        for path, target in self._links.items():
            if os.path.commonpath((root, os.path.realpath(path))) != root:
                raise self._leaves(str(path.relative_to(self.root)), target)

    def refusal(self, found: str, expected: str, remedy: str = "correct the files") -> BadInputError:
        return BadInputError(self.origin, found, expected, remedy)

    def _place(self, name: str, *, may_be_top: bool = False) -> Path:
        """Return where an entry belongs. Raise BadInputError if its name leaves the folder.

        ``may_be_top``: True if it may be the top folder itself.
        """
        parts = [part for part in name.split("/") if part not in ("", ".")]
        bad = name.startswith("/") or ".." in parts or "\0" in name or len(name.encode(errors="replace")) > 4000
        if bad or (not parts and not may_be_top) or any(len(os.fsencode(part)) > 255 for part in parts):
            raise self.refusal(f"an entry with the name {name[:200]!r}", "a path below the top folder")
        return self.root.joinpath(*parts)

    def _folder(self, path: Path) -> None:
        """Make a folder with those above it. Raise BadInputError if one of them is a file or a link."""
        for place in [*reversed(path.relative_to(self.root).parents), path.relative_to(self.root)]:
            here = self.root / place
            if here in self._links or (os.path.lexists(here) and not here.is_dir()):
                raise self.refusal(f"{str(place)!r} as a folder and as a file or link", "one of the two")
            if not here.is_dir():
                self._count()
                here.mkdir()
                here.chmod(0o755)

    def _count(self) -> None:
        self.entries += 1
        if self.entries > self.max_entries:
            raise self.refusal(
                f"more than {self.max_entries} files and folders", f"at most {self.max_entries}",
                "remove what the script does not need, and load data with spec.dataset",
            )  # fmt: skip

    def _leaves(self, name: str, target: str) -> BadInputError:
        found = f"the link {name[:200]!r} to {target[:200]!r}"
        return self.refusal(found, "links that stay among the files", "replace the link by its file")
