"""The releases of dljob, each with its commit, in ``releases.json``.

A clone of the repository may lack tags, so tests of upgrades find the commit of a release in this file. Upgrades are
supported from the first release in the file and from all later releases.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = "releases.json"
VERSION_FILES = ("operator/contract/pyproject.toml", "operator/pyproject.toml", "trainer-image/pyproject.toml")


class ReleaseError(Exception):
    """An error whose message is one line: what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Release:
    version: str
    commit: str
    date: str


def releases(root: Path = ROOT) -> tuple[Release, ...]:
    """Return the recorded releases, oldest first. Raise ReleaseError if the file is invalid."""
    path = root / FILE
    try:
        found = tuple(Release(**entry) for entry in list[dict[str, str]](json.loads(path.read_text())))
    except (OSError, ValueError, TypeError) as error:
        raise ReleaseError(
            f"{FILE}: found invalid content ({error}); expected a JSON list of releases, each with version, commit "
            "and date. Correct the file"
        ) from None
    for release in found:
        if not re.fullmatch(r"\d+\.\d+\.\d+", release.version) or not re.fullmatch(r"[0-9a-f]{40}", release.commit):
            raise ReleaseError(f"{FILE}: found {release}; expected a version such as 0.2.0 and a whole commit hash")
    return found


def unpack(version: str, folder: Path, root: Path = ROOT) -> None:
    """Write the source files of the release ``version`` into ``folder``, which must not exist.

    Raise ReleaseError if releases.json does not list the release, if ``folder`` exists, or if this clone lacks the
    release's commit.
    """
    known = {release.version: release for release in releases(root)}
    if version not in known:
        raise ReleaseError(
            f"release: found {version}, which {FILE} does not list; expected one of "
            f"{', '.join(known) or 'no release yet'}"
        )
    if folder.exists():
        raise ReleaseError(
            f"{folder}: found an existing file or folder; expected a path that does not exist. Choose another path"
        )
    commit = known[version].commit
    if _git(root, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise ReleaseError(
            f"release {version}: found no commit {commit} in this clone; expected it there. Run git fetch --unshallow"
        )
    folder.mkdir(parents=True)
    with tempfile.TemporaryFile() as archive:
        subprocess.run(["git", "-C", root, "archive", commit], stdout=archive, check=True, timeout=300)
        archive.seek(0)
        subprocess.run(["tar", "-x", "-C", folder], stdin=archive, check=True, timeout=300)


def record(root: Path = ROOT) -> Release:
    """Record the commit in HEAD as a release in releases.json, and set the date of its section in CHANGELOG.md.

    The version of the release is the one in the pyproject.toml of all distributions. Raise ReleaseError if these
    versions differ, if the release is already recorded, if files are not committed, or if the changelog has no section
    for the version.
    """
    versions = {name: _version((root / name).read_text()) for name in VERSION_FILES}
    if len(set(versions.values())) > 1:
        raise ReleaseError(f"version: found {versions}; expected the same version in all these files. Edit them")
    version = next(iter(versions.values()))
    if version in (release.version for release in releases(root)):
        raise ReleaseError(
            f"release: found version {version} in {FILE} already; expected a new version. Raise the version in "
            f"{VERSION_FILES}"
        )
    if _git(root, "status", "--porcelain").stdout.strip():
        raise ReleaseError(
            "release: found changes in the working tree that are not committed; expected none. Commit them first"
        )
    commit = _git(root, "rev-parse", "HEAD").stdout.strip()
    release = Release(version, commit, datetime.now(UTC).strftime("%Y-%m-%d"))
    changelog = root / "CHANGELOG.md"
    unreleased = f"## [{version}] - Unreleased"
    if unreleased not in (text := changelog.read_text()):
        raise ReleaseError(
            f"CHANGELOG.md: found no section {unreleased!r}; expected one that describes this release. Add it"
        )
    changelog.write_text(text.replace(unreleased, f"## [{version}] - {release.date}"))
    entries = [asdict(one) for one in (*releases(root), release)]
    (root / FILE).write_text(json.dumps(entries, indent=2) + "\n")
    return release


def _version(text: str) -> str:
    match = re.search(r'^version = "([^"]+)"$', text, re.MULTILINE)
    return match[1] if match else "none"


def _git(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, timeout=60, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/release", description="Lists, records and unpacks releases of dljob.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="print version, commit and date of each release")
    source = verbs.add_parser("source", help="write the source of a release into a new folder")
    source.add_argument("version", help="such as 0.2.0")
    source.add_argument("folder", type=Path)
    verbs.add_parser("record", help="record HEAD as the release of the current version; commit the result")
    given = parser.parse_args(arguments)
    try:
        if given.verb == "source":
            unpack(given.version, given.folder)
        found = [record()] if given.verb == "record" else releases() if given.verb == "list" else ()
        for release in found:
            print(release.version, release.commit, release.date)
    except ReleaseError as error:
        print(f"hack/release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
