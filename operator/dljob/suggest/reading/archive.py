"""Read images from WebDataset archives: tar files in which files of a sample share their name up to the first dot."""

import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from dljob.suggest.errors import DataError
from dljob.suggest.reading.images import ARCHIVE, MAX_NBYTES, PARTS, SUFFIXES, ImageFile, Images, decoded_images

ARCHIVES = (".tar", ".tar.gz", ".tgz")
CHUNK_NBYTES = 2**20
LABELS = ("cls", "label", "class", "target")
"""Keys of a sample's JSON file that hold its class, and extensions of text files that do."""


def is_archive(path: Path) -> bool:
    """Return True for an archive, and for a folder with archives directly in it."""
    if path.is_dir():
        return any(is_archive(child) for child in path.iterdir() if child.is_file())
    return path.name.lower().endswith(ARCHIVES)


def read_archives(path: Path, side: int | None = None) -> Images:
    """Return the images of an archive, or of all archives of a folder. ``side``: as in ``read_folder``.

    The class of an image is the content of the file ``KEY.cls``, the key ``label`` or ``cls`` of ``KEY.json``, or else
    the name of the image's folder in the archive. Archives whose names begin with ``test`` or ``val``, and folders of
    classes in a folder with such a name, are the test part, if there are others. Raise DataError for a broken archive
    or an image without a class.
    """
    shards = sorted(c for c in path.iterdir() if c.is_file() and is_archive(c)) if path.is_dir() else [path]
    test_shards = [shard for shard in shards if shard.name.lower().startswith(("test", "val"))]
    files: dict[str, list[ImageFile]] = {}
    test_files: dict[str, list[ImageFile]] = {}
    nbytes = held_nbytes = 0
    for shard in shards:
        members = _members(shard, MAX_NBYTES - nbytes)
        held_nbytes = max(held_nbytes, nbytes + sum(len(file) for parts in members.values() for file in parts.values()))
        for label, key, file in _samples(shard, members):
            own = test_files if shard in test_shards or in_test_folder(key) else files
            nbytes += len(file.content) if isinstance(file.content, bytes) else 0
            own.setdefault(label, []).append(file)
        members.clear()  # Only its images stay in memory while the next archive is read.
    if not files:
        files, test_files = test_files, {}
    if len(files) < 2:
        raise DataError(
            f"{path}: found {len(files)} classes of images; expected at least two. Add images of other classes."
        )
    if unknown := sorted(set(test_files) - set(files)):
        raise DataError(f"{path}: found the class {unknown[0]!r} in the test part only; expected it in both parts.")
    return replace(decoded_images(path, files, test_files, side), form=ARCHIVE, held_nbytes=held_nbytes)


def in_test_folder(key: str) -> bool:
    """Return True if the folder above the folder of a sample is that of a test part, such as ``test/cat/1``."""
    return PurePosixPath(key).parent.parent.name.lower() in PARTS[1]


def _members(shard: Path, most_nbytes: int) -> dict[str, dict[str, bytes]]:
    """Return key → extension → content of the files of an archive. Their names are equal up to the first dot.

    Raise DataError for another file, and before more than ``most_nbytes`` are in memory.
    """
    members: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(shard) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                path = PurePosixPath(member.name)
                if content is None or path.name.startswith("."):
                    continue
                if (most_nbytes := most_nbytes - member.size) < 0:
                    raise DataError(
                        f"{shard}: found more than {MAX_NBYTES >> 20} MiB of files; expected at most this. Pass some "
                        "of the archives, or a sample."
                    )
                name, _, extension = path.name.partition(".")
                members.setdefault(str(path.parent / name), {})[extension.lower()] = content.read()
            while archive.fileobj is not None and archive.fileobj.read(CHUNK_NBYTES):
                pass  # The checksum of gzip is at the end.
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{shard}: found no readable tar archive ({' '.join(str(error).split())[:100] or 'it is empty'}); expected "
            "one. Copy it again."
        ) from None
    if not members:
        raise DataError(f"{shard}: found an archive without files; expected images with their classes. Write it again.")
    return members


def _samples(shard: Path, members: Mapping[str, dict[str, bytes]]) -> Iterator[tuple[str, str, ImageFile]]:
    """Yield class, key and image of each sample of an archive with the files ``members``.

    Images of one key are one sample, unless only their folder says the class.
    """
    for key, parts in members.items():
        images = [name for name in parts if f".{name.rpartition('.')[2]}" in SUFFIXES]
        for image in images[:1] if {*LABELS, "json"} & set(parts) else images:
            yield _label(shard, key, parts), key, ImageFile(f"{shard}: {key}.{image}", parts[image])


def _label(shard: Path, key: str, parts: dict[str, bytes]) -> str:
    """Return the class of a sample."""
    text: object = None
    try:
        if own := [parts[name] for name in LABELS if name in parts]:
            text = own[0].decode().strip()
        if text is None and "json" in parts:
            document = json.loads(parts["json"])
            found = [document.get(name) for name in LABELS] if isinstance(document, dict) else []
            text = next((each for each in found if each is not None), None)
    except ValueError as error:
        raise DataError(f"{shard}: {key}: found a class that cannot be read ({error}); expected a text.") from None
    if text is None:
        text = PurePosixPath(key).parent.name.replace("..", "")
    if text is not None and not isinstance(text, str | int):
        raise DataError(
            f"{shard}: {key}: found the class {text!r:.60}; expected one text or whole number. Write it so to the "
            f"file {key}.json."
        )
    if text == "":
        raise DataError(
            f"{shard}: {key}: found no class; expected a file {key}.cls, a key label in {key}.json, or a folder with "
            "the name of the class. Add it."
        )
    return str(text)
