"""Tests of fetching data from S3, against the server of moto."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from dltrain.data import remote_sources
from dltrain.data.fetch import main
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_OK

DATA = np.random.Generator(np.random.Philox(8)).bytes(300_001)
SUM = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials as the init container gets them from a Secret, and fill the bucket."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote_sources, "CHUNK_NBYTES", 2**16)
    for name, value in {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "key", "ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    store.makedirs("corpus", exist_ok=True)
    store.pipe_file("corpus/sets/train.npz", DATA)
    store.pipe_file("corpus/sets/SHA256SUMS", f"{SUM}  train.npz\n".encode())


def test_object_is_fetched_by_ranges_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "train.npz"
    arguments = ["s3://corpus/sets/train.npz", "--to", str(target), "--sha256", SUM]
    assert main(arguments) == EXIT_OK
    assert target.read_bytes() == DATA
    [note] = (tmp_path / ".dljob").glob("*.json")
    target.rename(note.with_suffix(".part"))
    with note.with_suffix(".part").open("r+b") as part:
        part.truncate(200_000)
    note.write_text(note.read_text().replace('"nbytes"', '"of_nbytes"'))
    assert main(arguments) == EXIT_OK
    assert target.read_bytes() == DATA
    assert "resuming at 195.3 KiB" in capsys.readouterr().out


def test_folder_of_objects_is_fetched(tmp_path: Path) -> None:
    assert main(["s3://corpus/sets/SHA256SUMS", "--to", str(tmp_path / "SHA256SUMS")]) == EXIT_OK
    assert (tmp_path / "train.npz").read_bytes() == DATA


@pytest.mark.parametrize("name", ["corpus/sets/test.npz", "no-such-bucket/train.npz"])
def test_missing_object_or_bucket_is_reported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"s3://{name}", "--to", str(tmp_path / "x")]) == EXIT_BAD_INPUT
    assert f"nothing at s3://{name}" in capsys.readouterr().out.splitlines()[-1]
