"""Fetch the files of a training script into the pod: ``python -m dltrain.source.fetch git|archive|config-map …``.

The init container ``source`` of a job's pods runs this command. The files are complete in ``SOURCE_FILES_DIR`` or
absent: they are written beside it, and renamed at the end. Exit codes: 0 for success; 64 if the job's spec cannot
succeed; 74 if a retry may succeed; 143 if the process was stopped. The last line of output gives the reason.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dlcontract import SOURCE_FILES_DIR, SOURCE_INPUT_DIR
from dltrain.data.download import WAITS_S, Download, in_units, say
from dltrain.data.fetch import check
from dltrain.data.remote_sources import Fields, Source, TransientError
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_NOT_FETCHED, EXIT_OK, EXIT_STOPPED
from dltrain.source.archive import unpack
from dltrain.source.files import MAX_NBYTES, READ_NBYTES, Files

_SPEC = "spec.trainer.source"
_ARCHIVE = Fields(
    uri=f"{_SPEC}.archive.uri", sha256=f"{_SPEC}.archive.sha256", secret=f"{_SPEC}.archive.secretName", size=None
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    target: Path = options.to
    work = target.with_name("work")
    field = {"git": f"{_SPEC}.git.url", "archive": _ARCHIVE.uri, "config-map": f"{_SPEC}.configMap.name"}[options.kind]
    try:
        files = Files(work / "files", field)
        _fetch(options, work, files)
        _check_folder(options, files.root)
        shutil.rmtree(target, ignore_errors=True)
        files.root.rename(target)
        shutil.rmtree(work, ignore_errors=True)
    except BadInputError as error:
        say(str(error))
        return EXIT_BAD_INPUT
    except OSError as error:  # includes TransientError and errors of the disk
        say(f"{field}: {error}")
        return EXIT_NOT_FETCHED
    say(f"{files.entries} files and folders, {in_units(files.nbytes)}, in {target}")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dltrain.source.fetch", description="Fetches the files of a training script."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    git = kinds.add_parser("git", help="a commit of a git repository")
    git.add_argument("url", help="http:// or https:// URL")
    git.add_argument("revision", help="full hash of a commit")
    archive = kinds.add_parser("archive", help="a tar or zip archive")
    archive.add_argument("uri", help="http://, https://, s3:// or file://")
    archive.add_argument("--sha256", help="expected checksum of the archive, in hex digits")
    config_map = kinds.add_parser("config-map", help="the keys of a mounted ConfigMap")
    config_map.add_argument("name", help="name of the ConfigMap, for messages")
    for kind in (git, archive):
        kind.add_argument("--path", default="", help="folder among the files that must exist")
    for kind in (archive, config_map):
        kind.add_argument("--input", type=Path, default=Path(SOURCE_INPUT_DIR), help=argparse.SUPPRESS)
    for kind in (git, archive, config_map):
        kind.add_argument("--to", type=Path, default=Path(SOURCE_FILES_DIR), help=argparse.SUPPRESS)
    return parser


def _fetch(options: argparse.Namespace, work: Path, files: Files) -> None:
    if options.kind == "git":
        from dltrain.source.git import check_out  # takes time, and only this kind needs it

        _patiently(lambda: check_out(options.url, options.revision, work / "repository", files))
    elif options.kind == "archive":
        unpack(_archive(options, work), files)
    else:
        _copy(options, files)


def _patiently(call: Callable[[], None]) -> None:
    """Call a function again after each TransientError, with the pauses of a download."""
    for wait_s in WAITS_S:
        try:
            return call()
        except TransientError as error:
            say(f"{error}; retrying in {wait_s} s")
            time.sleep(wait_s)
    return call()


def _archive(options: argparse.Namespace, work: Path) -> Path:
    """Return the local path of the archive with the script, and check its checksum if one is given.

    For a ``file://`` URI, it is the file on the mounted PersistentVolumeClaim; otherwise a downloaded copy in ``work``.
    """
    if options.uri.startswith("file://"):
        path = Path(options.uri.removeprefix("file://"))
        if not path.is_file():
            found = f"no file {path.name} on the claim, or none that user {os.getuid()} may read"
            raise BadInputError(_ARCHIVE.uri, found, "an archive", "correct the URI, or put the file there")
        check(path, options.sha256, _ARCHIVE)
        return path
    notes = work / ".dljob"
    notes.mkdir(parents=True, exist_ok=True)
    target = work / "archive"
    Download(Source(options.uri, _ARCHIVE), target, notes, options.sha256, MAX_NBYTES).run()
    return target


def _copy(options: argparse.Namespace, files: Files) -> None:
    """Copy the keys of a ConfigMap, which the kubelet mounts as files. Its own entries begin with two dots."""
    folder: Path = options.input
    found = sorted(path for path in folder.glob("*") if not path.name.startswith("..") and path.is_file())
    if not found:
        # A retry may succeed: the ConfigMap may be created after the job.
        raise TransientError(
            f"found no ConfigMap {options.name!r}, or one without keys; expected a ConfigMap with a key for each file. "
            "Create it in the namespace of the job"
        )
    for path in found:
        with path.open("rb") as file:
            files.file(path.name, iter(lambda: file.read(READ_NBYTES), b""))
    files.finish()


def _check_folder(options: argparse.Namespace, root: Path) -> None:
    """Raise BadInputError if the working directory that the spec names is not among the files."""
    path = getattr(options, "path", "")
    if path and not (root / path).is_dir():
        names = ", ".join(sorted(item.name for item in root.iterdir() if item.is_dir())[:10]) or "no folders"
        expected = f"a folder among the files, whose top folder has {names}"
        raise BadInputError(f"{_SPEC}.{options.kind}.path", f"no folder {path!r}", expected, "correct the path")


if __name__ == "__main__":
    # For the first process of a container, the kernel ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_STOPPED))
    sys.exit(main())
