"""Fetching one commit of a git repository over http or https, with dulwich, because images may lack the program git."""

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dulwich.client import HttpGitClient, HTTPUnauthorized
from dulwich.errors import GitProtocolError, NotGitRepository
from dulwich.objects import S_ISGITLINK, Blob, Commit, ObjectID, Tag, Tree
from dulwich.refs import Ref
from dulwich.repo import Repo

from dltrain.data.download import in_units, say
from dltrain.data.remote_sources import SILENCE_S, TransientError
from dltrain.protocol.errors import BadInputError
from dltrain.source.files import MAX_NBYTES, READ_NBYTES, Files

_URL, _REVISION, _SECRET = (f"spec.trainer.source.git.{name}" for name in ("url", "revision", "secretName"))
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_ADVERTISED_ONLY = ("unadvertised", "not valid")
"""Words in the messages of servers that hand out only the commits to which branches and tags point."""
_UNKNOWN = ("not our ref", "not found", "bad object", "unknown revision")
_MAX_DEPTH = 100
"""Maximum depth of folders. Git refers to folders by hash, so a small repository can describe endlessly nested ones."""


def check_out(url: str, revision: str, store: Path, files: Files, max_pack_nbytes: int = MAX_NBYTES) -> None:
    """Fetch a commit and write its files to ``files``. ``store``: folder for a repository, which is removed afterwards.

    Credentials are in the environment variables ``GIT_USERNAME`` and ``GIT_PASSWORD``. The files are those of
    ``revision``, a full hash: git names all content by its hash, and dulwich computes it. Raise BadInputError if no
    retry can succeed, and TransientError otherwise. ``max_pack_nbytes``: maximum size of the download in bytes.
    """
    files.clear()  # An earlier try may have written some.
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    with Repo.init_bare(str(store)) as repository:
        _fetch(url, revision, repository, max_pack_nbytes)
        try:
            commit = repository.object_store[ObjectID(revision.encode())]
            while isinstance(commit, Tag):  # The hash of an annotated tag stands for one commit, too.
                commit = repository.object_store[commit.object[1]]
        except KeyError:
            raise _no_commit(url, revision) from None
        if not isinstance(commit, Commit):
            found = f"{revision}, a {commit.type_name.decode()}"
            raise BadInputError(_REVISION, found, "the hash of a commit", "write the hash that git log prints")
        say(f"{_shown(url)}: commit {commit.id.decode()}")
        try:
            _write(repository, commit.tree, "", files, 0)
        except (BadInputError, OSError):
            raise
        except Exception as error:  # whatever dulwich raises for objects that are missing or damaged
            raise TransientError(f"{_shown(url)}: damaged objects ({type(error).__name__}: {error})") from error
    shutil.rmtree(store)
    files.finish()


def _fetch(url: str, revision: str, repository: Any, max_pack_nbytes: int) -> None:
    """Fetch the commit without its history. Servers that refuse single commits send all branches and tags instead."""
    for name in _PROXIES:  # dulwich knows the lower-case names alone.
        if value := os.environ.get(name):
            os.environ.setdefault(name.lower(), value)
    try:
        try:
            _fetch_pack(url, repository, max_pack_nbytes, revision, depth=1)
        except GitProtocolError as error:
            if not any(words in str(error) for words in _ADVERTISED_ONLY):
                raise
            say(f"{_shown(url)}: the server refuses single commits, so all branches and tags are fetched")
            _fetch_pack(url, repository, max_pack_nbytes, None, depth=None)
    except BadInputError:
        raise
    except Exception as error:
        raise _meaning(error, url, revision) from error


def _fetch_pack(url: str, repository: Any, max_pack_nbytes: int, revision: str | None, depth: int | None) -> None:
    """Fetch the objects of a commit, or of all branches and tags if ``revision`` is None."""
    # Values that were read from a file often end with a line break.
    username, password = (os.environ.get(name, "").strip() or None for name in ("GIT_USERNAME", "GIT_PASSWORD"))
    user = (username or "git") if password else username
    client = HttpGitClient(url, username=user, password=password, timeout=SILENCE_S, quiet=True)
    file, commit, abort = repository.object_store.add_pack()
    nbytes = 0

    def write(data: bytes) -> int:
        nonlocal nbytes
        nbytes += len(data)
        if nbytes > max_pack_nbytes:
            found, expected = f"more than {in_units(max_pack_nbytes)} at {_shown(url)}", "a smaller repository"
            raise BadInputError(_URL, found, expected, "use an archive of the files that the script needs")
        return int(file.write(data))

    def wants(refs: Mapping[Ref, ObjectID], depth: int | None = None) -> list[ObjectID]:
        return [ObjectID(revision.encode())] if revision is not None else sorted(set(refs.values()))

    try:
        path, walker = urlsplit(url).path, repository.get_graph_walker()
        # In version 2 of the protocol, dulwich loses the server's message about a commit that it does not have.
        client.fetch_pack(path, wants, walker, write, depth=depth, protocol_version=0)
    except BaseException:
        abort()
        raise
    commit()


def _write(repository: Any, tree: bytes, folder: str, files: Files, depth: int) -> None:
    """Write the files of a tree, with those of its folders, to ``files``."""
    if depth > _MAX_DEPTH:
        raise files.refusal(f"more than {_MAX_DEPTH} folders in each other", "fewer folders")
    found = repository.object_store[tree]
    assert isinstance(found, Tree), "git refers to a tree"
    for entry in found.iteritems():
        name = f"{folder}{os.fsdecode(entry.path)}"
        if "/" in os.fsdecode(entry.path) or entry.path.lower() == b".git":
            raise files.refusal(f"an entry with the name {name!r}", "names without a slash, other than .git")
        if S_ISGITLINK(entry.mode):
            say(f"{name}: a submodule, which is not fetched")
            files.folder(name)
        elif stat.S_ISDIR(entry.mode):
            files.folder(name)
            _write(repository, entry.sha, f"{name}/", files, depth + 1)
        else:
            blob = repository.object_store[entry.sha]
            assert isinstance(blob, Blob), "git refers to a file"
            if stat.S_ISLNK(entry.mode):
                files.link(name, os.fsdecode(blob.data))
            else:
                files.file(name, _pieces(blob), executable=bool(entry.mode & stat.S_IXUSR))


def _pieces(blob: Blob) -> Iterator[bytes]:
    data = blob.data
    for begin in range(0, len(data), READ_NBYTES):
        yield data[begin : begin + READ_NBYTES]


def _meaning(error: Exception, url: str, revision: str) -> Exception:
    """Return the BadInputError or TransientError that corresponds to an error of dulwich."""
    if isinstance(error, NotGitRepository):
        return BadInputError(
            _URL, f"no git repository at {_shown(url)}", "a repository that the job may read",
            "correct the URL, or, for a private repository, name a Secret in spec.trainer.source.git.secretName",
        )  # fmt: skip
    text = " ".join(str(error).split())[:300]
    if isinstance(error, HTTPUnauthorized) or "http resp 403" in text:
        found = f"no permission to read {_shown(url)}"
        return BadInputError(
            _SECRET, found, "a Secret with GIT_PASSWORD, and GIT_USERNAME if the server needs it",
            "name a Secret with credentials, or correct them",
        )  # fmt: skip
    if isinstance(error, GitProtocolError) and any(words in text for words in _UNKNOWN):
        return _no_commit(url, revision)
    # Also what dulwich raises for a damaged pack file, for which it has no common class.
    return TransientError(f"{_shown(url)}: {type(error).__name__}: {text}")


def _no_commit(url: str, revision: str) -> BadInputError:
    return BadInputError(
        _REVISION, f"no commit {revision} in {_shown(url)}", "a commit of this repository",
        "push the commit, or write another hash: git ls-remote URL BRANCH prints that of a branch",
    )  # fmt: skip


def _shown(url: str) -> str:
    """Return the URL for messages, without what may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
