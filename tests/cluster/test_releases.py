"""Tests of hack/release: releases are recorded with their commit, and unpacked from it."""

import subprocess
from pathlib import Path

import pytest

import releases
from releases import ReleaseError, record, unpack

CHANGELOG = "# Changelog\n\n## [1.2.3] - Unreleased\n\n- New.\n"


def git(root: Path, *words: str) -> str:
    author = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", root, *author, *words], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name in releases.VERSION_FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('[project]\nname = "x"\nversion = "1.2.3"\n')
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    (root / "releases.json").write_text("[]\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def test_recorded_release_is_unpacked_from_its_commit(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    made = record(repository)
    assert (made.version, made.commit) == ("1.2.3", commit)
    assert f"## [1.2.3] - {made.date}" in (repository / "CHANGELOG.md").read_text()
    assert releases.releases(repository) == (made,)
    git(repository, "commit", "-qam", "record")
    unpack("1.2.3", tmp_path / "source", repository)
    assert (tmp_path / "source/CHANGELOG.md").read_text() == CHANGELOG
    with pytest.raises(ReleaseError, match="expected a path that does not exist"):
        unpack("1.2.3", tmp_path / "source", repository)
    with pytest.raises(ReleaseError, match=r"found 1\.2\.4.*; expected one of 1\.2\.3"):
        unpack("1.2.4", tmp_path / "other", repository)


def test_release_is_recorded_once_and_with_everything_committed(repository: Path) -> None:
    (repository / "new").touch()
    with pytest.raises(ReleaseError, match="not committed"):
        record(repository)
    (repository / "new").unlink()
    record(repository)
    git(repository, "commit", "-qam", "record")
    with pytest.raises(ReleaseError, match=r"found version 1\.2\.3 in releases\.json already; expected a new version"):
        record(repository)


def test_distributions_have_one_version(repository: Path) -> None:
    (repository / releases.VERSION_FILES[0]).write_text('version = "1.2.4"\n')
    with pytest.raises(ReleaseError, match="expected the same version in all these files"):
        record(repository)


@pytest.mark.parametrize(
    "text", ["", "7", '[{"version": "1"}]', '[{"version": "1.2", "commit": "abc", "date": "2026-01-01"}]']
)
def test_invalid_file_is_reported(text: str, repository: Path) -> None:
    (repository / "releases.json").write_text(text)
    with pytest.raises(ReleaseError, match=r"releases\.json: found"):
        releases.releases(repository)


def test_release_that_this_clone_lacks_is_reported(repository: Path, tmp_path: Path) -> None:
    (repository / "releases.json").write_text(f'[{{"version": "1.0.0", "commit": "{"0" * 40}", "date": "2026-01-01"}}]')
    with pytest.raises(ReleaseError, match=r"found no commit 0000.* Run git fetch --unshallow"):
        unpack("1.0.0", tmp_path / "source", repository)


def test_changelog_dates_every_release_of_this_repository() -> None:
    text = (releases.ROOT / "CHANGELOG.md").read_text()
    for release in releases.releases():
        assert f"## [{release.version}] - {release.date}" in text
