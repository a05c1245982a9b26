"""Data by URI: the file is copied into the project, the job reads it from the URI, and errors name the URI."""

from pathlib import Path

import pytest
import yaml

from dljob.cli.entry import main
from dljob.suggest.errors import DataError
from dljob.suggest.reading.remote import copy_of
from support.servers.files import serving

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
