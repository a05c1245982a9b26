"""Data by URI: the file is copied into the project, the job reads it from the URI, and errors name the URI."""

import socket
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import yaml

from dljob.cli.entry import main
from dljob.suggest.errors import DataError
from dljob.suggest.reading.remote import copy_of
from support.servers.files import serving
from support.trainer.object_store import Server, server

TABLE = ("a,target\n" + "".join(f"{i % 7},{i % 2}\n" for i in range(40))).encode()


def test_project_keeps_a_copy_and_the_job_reads_the_uri(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.files["/tables/data.csv"] = TABLE
        uri = f"{server.uri}/tables/data.csv"
        assert main(["suggest", uri, "--write", str(tmp_path / "project")]) == 0
    assert "linear model   accuracy" in capsys.readouterr().out
    assert (tmp_path / "project" / "data.csv").read_bytes() == TABLE
    assert str(tmp_path / "project" / "data.csv") in (tmp_path / "project" / "train.py").read_text(encoding="utf-8")
    _, job = yaml.safe_load_all((tmp_path / "project" / "job.yaml").read_text(encoding="utf-8"))
    assert job["spec"]["dataset"]["uri"] == uri


def test_broken_data_leave_no_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.csv").write_bytes(b"a,b\n")
    uri = (tmp_path / "data.csv").as_uri()
    assert main(["suggest", uri, "--no-baseline", "--write", str(tmp_path / "project")]) == 2
    assert "only a header" in capsys.readouterr().err
    assert not (tmp_path / "project").exists()


@pytest.mark.parametrize("uri", ["file:///no/such/data.csv", "nothing://host/data.csv", "https://"])
def test_unreadable_uri_is_named(tmp_path: Path, uri: str) -> None:
    with pytest.raises(DataError) as error:
        copy_of(uri, tmp_path)
    assert str(error.value).startswith(f"{uri}: found")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, "the server answered 401 Unauthorized); expected one. Set the credentials"),
        (404, "the server answered 404 Not Found); expected one. Correct the URI"),
        (500, "the server answered 500 Internal Server Error); expected one. Correct the URI, or try again later"),
    ],
)
def test_the_reason_of_the_server_is_named(tmp_path: Path, status: int, expected: str) -> None:
    """Fixed bug: fsspec calls each of these a file that does not exist, and so did the message."""
    with serving() as server:
        server.answers = [-status]
        with pytest.raises(DataError) as error:
            copy_of(f"{server.uri}/data.csv", tmp_path)
    assert expected in str(error.value)


def test_redirects_are_followed_until_they_are_too_many(tmp_path: Path) -> None:
    with serving() as server:
        server.files["/data.csv"] = TABLE
        server.redirects |= {"/moved.csv": "/data.csv", "/loop.csv": "/loop.csv"}
        assert copy_of(f"{server.uri}/moved.csv", tmp_path).read_bytes() == TABLE
        with pytest.raises(DataError, match="TooManyRedirects"):
            copy_of(f"{server.uri}/loop.csv", tmp_path)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_ends_early_is_an_error(tmp_path: Path, ranges: bool) -> None:
    with serving() as server:
        server.files["/data.csv"], server.ranges, server.longest_nbytes = TABLE, ranges, 20
        with pytest.raises(DataError, match=r"found no readable file .*received 20 of"):
            copy_of(f"{server.uri}/data.csv", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dljob.suggest.reading.remote.SILENT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(DataError, match="no answer for"):
            copy_of(f"http://127.0.0.1:{silent.getsockname()[1]}/data.csv", tmp_path)


def test_a_page_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    """Such as the page for a login. Fixed bug: the message was about delimiters."""
    with serving() as server:
        server.files["/data.csv"] = b"\n<!DOCTYPE html><html>Please log in</html>"
        with pytest.raises(DataError, match="found a page of HTML; expected the file itself"):
            copy_of(f"{server.uri}/data.csv", tmp_path)
        server.files["/page.txt"] = server.files["/data.csv"]
        assert copy_of(f"{server.uri}/page.txt", tmp_path).exists()


def test_too_large_a_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dljob.suggest.reading.remote.MAX_NBYTES", len(TABLE) - 1)
    with serving() as server:
        server.files["/data.csv"] = TABLE
        with pytest.raises(DataError, match="expected at most this"):
            copy_of(f"{server.uri}/data.csv", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_claim_of_the_cluster_is_named(tmp_path: Path) -> None:
    """Fixed bug: the message was 'Protocol not known: pvc. Correct the URI.'"""
    with pytest.raises(DataError, match=r"found a volume of a cluster.*--dataset-uri pvc://claim/data\.csv"):
        copy_of("pvc://claim/data.csv", tmp_path)


def test_errors_of_the_data_name_the_uri_instead_of_the_copy(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.files["/data.csv"] = b"a,b\n1,2\n1,2,3\n"
        assert main(["suggest", f"{server.uri}/data.csv", "--no-baseline"]) == 2
        assert f"dljob: {server.uri}/data.csv: line 3: found 3 fields" in capsys.readouterr().err


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Run a server with the table ``sets/data.csv``, whose address and credentials are in the environment."""
    with server() as running:
        running.client().put_object(Bucket="models", Key="sets/data.csv", Body=TABLE)
        for name, value in running.environ().items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield running
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_object_of_s3_is_copied(store: Server, tmp_path: Path) -> None:
    assert copy_of("s3://models/sets/data.csv", tmp_path).read_bytes() == TABLE


def test_what_is_wrong_in_s3_is_named(store: Server, tmp_path: Path) -> None:
    def error(uri: str) -> str:
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with pytest.raises(DataError) as found:
            copy_of(uri, tmp_path)
        assert str(found.value).startswith(uri) and not list(tmp_path.iterdir())
        return str(found.value)

    assert "it does not exist" in error("s3://models/sets/none.csv")
    assert "bucket does not exist" in error("s3://nowhere/data.csv")
    assert "found no name of a file" in error("s3://models/")
    store.refuse("HeadObject", 403, "AccessDenied")
    store.refuse("GetObject", 403, "AccessDenied")
    assert "Set the credentials" in error("s3://models/sets/data.csv")
