"""Tests of scripts from git: real repositories, served by git itself over HTTP."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_NOT_FETCHED, EXIT_OK
from dltrain.source import fetch
from dltrain.source.files import Files
from dltrain.source.git import check_out
from support.servers.git import GitServer, commit, git, serving

ABSENT = "0123456789" * 4


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with two commits and a link, a program and a folder."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "examples" / "digits").mkdir(parents=True)
    (folder / "train.py").write_text("print('first')\n")
    commit(folder)
    (folder / "train.py").write_text("print('second')\n")
    (folder / "examples" / "digits" / "train.py").write_bytes(b"import helper\n" * 1000)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "latest.py").symlink_to("examples/digits/train.py")
    commit(folder)
    return folder


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "repositories" / "team"
    shutil.copytree(template, folder, symlinks=True)
    return folder


@pytest.fixture
def server(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "WAITS_S", (0.0,))
    with serving(repository.parent) as found:
        yield found


def run(server: GitServer, target: Path, revision: str, *more: str, url: str = "") -> int:
    return fetch.main(["git", url or f"{server.uri}/team/.git", revision, "--to", str(target), *more])


def test_files_of_a_commit_are_those_of_git(server: GitServer, repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "source" / "files"
    assert run(server, target, git(repository, "rev-parse", "HEAD"), "--path=examples/digits") == EXIT_OK
    expected = set(git(repository, "ls-files").splitlines())
    found = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    assert found == expected
    assert all((target / name).read_bytes() == (repository / name).read_bytes() for name in expected)
    assert str((target / "latest.py").readlink()) == "examples/digits/train.py"
    assert {name: (target / name).stat().st_mode & 0o777 for name in ("run.sh", "train.py", "examples")} == {
        "run.sh": 0o755, "train.py": 0o644, "examples": 0o755,
    }  # fmt: skip
    assert [path.name for path in target.parent.iterdir()] == ["files"], "neither a pack nor a history remains"


def test_older_commit_stays_that_commit_after_a_push(server: GitServer, repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD~1")
    (repository / "train.py").write_text("print('third')\n")
    commit(repository)
    assert run(server, tmp_path / "source" / "files", first) == EXIT_OK
    assert (tmp_path / "source" / "files" / "train.py").read_text() == "print('first')\n"


def test_server_that_refuses_single_commits_sends_all_of_them(
    server: GitServer, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.only_advertised = True
    assert run(server, tmp_path / "source" / "files", git(repository, "rev-parse", "HEAD~1")) == EXIT_OK
    assert "the server refuses single commits" in capsys.readouterr().out
    assert (tmp_path / "source" / "files" / "train.py").read_text() == "print('first')\n"


def test_second_run_replaces_what_the_first_one_left(server: GitServer, repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "source" / "files"
    (target.parent / "work" / "files").mkdir(parents=True)
    (target.parent / "work" / "files" / "half").touch()
    for revision in ("HEAD~1", "HEAD"):
        assert run(server, target, git(repository, "rev-parse", revision)) == EXIT_OK
    assert (target / "train.py").read_text() == "print('second')\n"
    assert not (target / "half").exists()


def test_private_repository_needs_the_password(
    server: GitServer, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server.password, head = "token", git(repository, "rev-parse", "HEAD")
    assert run(server, tmp_path / "files", head) == EXIT_BAD_INPUT
    assert "spec.trainer.source.git.secretName: found no permission" in capsys.readouterr().out
    monkeypatch.setenv("GIT_PASSWORD", "token")
    assert run(server, tmp_path / "files", head) == EXIT_OK
    assert "token" not in capsys.readouterr().out


def test_hash_of_an_annotated_tag_stands_for_its_commit(server: GitServer, repository: Path, tmp_path: Path) -> None:
    git(repository, "tag", "-a", "v1", "-m", "v1", "HEAD~1")
    assert run(server, tmp_path / "files", git(repository, "rev-parse", "v1")) == EXIT_OK
    assert (tmp_path / "files" / "train.py").read_text() == "print('first')\n"


def test_hash_of_a_folder_is_refused(
    server: GitServer, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(repository, "tag", "-a", "folder", "-m", "a tag of a tree", "HEAD^{tree}")
    assert run(server, tmp_path / "files", git(repository, "rev-parse", "folder")) == EXIT_BAD_INPUT
    assert "a tree; expected the hash of a commit" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"revision": ABSENT}, EXIT_BAD_INPUT, f"spec.trainer.source.git.revision: found no commit {ABSENT}"),
        ({"url": "/nothing/.git"}, EXIT_BAD_INPUT, "spec.trainer.source.git.url: found no git repository"),
        ({"more": "--path=nowhere"}, EXIT_BAD_INPUT, "spec.trainer.source.git.path: found no folder 'nowhere'"),
        ({"status": 503}, EXIT_NOT_FETCHED, "spec.trainer.source.git.url: http"),
        ({"status": 403}, EXIT_BAD_INPUT, "found no permission to read"),
    ],
    ids=["no such commit", "no such repository", "no such folder", "broken server", "forbidden"],
)
def test_failure_is_one_line_that_names_the_field(
    server: GitServer, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    change: dict[str, Any], code: int, words: str,
) -> None:  # fmt: skip
    server.status = change.get("status")
    revision = change.get("revision") or git(repository, "rev-parse", "HEAD")
    more = (change["more"],) if "more" in change else ()
    url = server.uri + change["url"] if "url" in change else ""
    assert run(server, tmp_path / "files", revision, *more, url=url) == code
    assert words in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "files").exists()


def test_server_that_is_down_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "WAITS_S", (0.0,))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert fetch.main(["git", "http://127.0.0.1:9/a.git", ABSENT, "--to", str(tmp_path / "files")]) == EXIT_NOT_FETCHED
    assert "spec.trainer.source.git.url: http://127.0.0.1:9/a.git" in capsys.readouterr().out.splitlines()[-1]


def test_pack_file_has_a_limit(server: GitServer, repository: Path, tmp_path: Path) -> None:
    (repository / "data.bin").write_bytes(os.urandom(2**17))
    revision = commit(repository)
    files = Files(tmp_path / "files", "spec.trainer.source.git.url")
    with pytest.raises(BadInputError, match=r"found more than 100.0 KiB at http.*use an archive|Use an archive"):
        check_out(f"{server.uri}/team/.git", revision, tmp_path / "store", files, max_pack_nbytes=102400)


def test_link_out_of_the_repository_is_refused(
    server: GitServer, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "secrets").symlink_to("/etc/passwd")
    assert run(server, tmp_path / "files", commit(repository)) == EXIT_BAD_INPUT
    assert "the link 'secrets' to '/etc/passwd'" in capsys.readouterr().out
